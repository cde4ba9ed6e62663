"""Shares the GPUs of all nodes between training and serving."""

from scripts.launcher.variables import Variables
from slime_verlog import ConfigError


def layout(given: Variables, disaggregated: bool, engine_gpus: int) -> list[str]:
    """Return the flags of nodes and GPUs; raises ConfigError if training, serving or engines do not
    divide them."""
    nodes = given.num_nodes
    gpus = given.num_gpus
    per_node = given.num_gpus
    if given.rollout_gpus and not disaggregated:
        raise ConfigError(
            f"ROLLOUT_GPUS={given.rollout_gpus} has no meaning where all GPUs train and serve in "
            "turns; add --disaggregated"
        )
    rollout_gpus = given.rollout_gpus or per_node // 2
    serving = per_node * nodes
    offset = 0  # where serving starts inside a node
    if disaggregated and given.rollout_gpus is None and nodes > 1:
        nodes -= given.num_nodes // 2  # whole nodes, the last of which serve
        serving = per_node * (given.num_nodes // 2)
    elif disaggregated:
        gpus -= rollout_gpus
        if not 0 < gpus < per_node:
            raise ConfigError(
                f"ROLLOUT_GPUS={rollout_gpus} leaves none of NUM_GPUS={per_node} for training or "
                "serving"
            )
        serving = rollout_gpus * nodes
        offset = gpus * nodes % per_node
    check_division("TENSOR_PARALLEL", given.tensor_parallel, gpus * nodes, "train")
    check_division("ENGINE_GPUS", engine_gpus, serving, "serve")
    if serving > per_node - offset:  # slime counts NUM_GPUS GPUs from the first engine as one host
        if offset:
            raise ConfigError(
                f"with ROLLOUT_GPUS={rollout_gpus} and NUM_NODES={nodes}, serving starts inside a "
                "node and goes on in the next, whose engines slime would look for on the first: "
                "leave ROLLOUT_GPUS out, or lower it until ROLLOUT_GPUS x NUM_NODES is at most "
                f"NUM_GPUS={per_node} or a multiple of it"
            )
        if per_node % engine_gpus and engine_gpus % per_node:
            raise ConfigError(
                f"ENGINE_GPUS={engine_gpus} must divide NUM_GPUS={per_node} or be a multiple of "
                "it; an engine would be on two nodes"
            )
    flags = ["--rollout-num-gpus", str(serving)] if disaggregated else ["--colocate"]
    return flags + training_flags(nodes, gpus, per_node)


def training_flags(nodes: int, gpus: int, per_node: int) -> list[str]:
    """Return the flags for training on `gpus` GPUs of each node, which has `per_node`."""
    flags = {
        "--actor-num-nodes": nodes,
        "--actor-num-gpus-per-node": gpus,
        "--num-gpus-per-node": per_node,
    }
    return [word for name, number in flags.items() for word in (name, str(number))]


def check_division(name: str, count: int, gpus: int, use: str) -> None:
    """Raise ConfigError if a variable does not divide the GPUs that train or serve."""
    if gpus % count:
        uneven = f"{name}={count} does not divide the {gpus} GPUs that {use}"
        raise ConfigError(f"{uneven}; change it, or the number of GPUs")
