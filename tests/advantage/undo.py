"""Takes `advantage.patch.install` back, so that the next test finds the framework unpatched."""

import sys


def uninstall() -> None:
    """Restore every function of slime and miles that the patch replaced."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("slime", "slime_plugins", "miles"):
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for owner in (module, *classes):
                for attribute, value in list(vars(owner).items()):
                    if "__advantage_original__" in getattr(value, "__dict__", {}):
                        setattr(owner, attribute, value.__advantage_original__)
