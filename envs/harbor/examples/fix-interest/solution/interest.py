"""What a deposit is worth after some years."""

import sys


def worth(amount, percent, years):
    return amount * (1 + percent / 100) ** years


def main(arguments):
    try:
        amount, percent, years = arguments
        amount = float(amount)
        percent = float(percent)
        years = int(years)
        if years < 0:
            raise ValueError("years must not be negative")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{worth(amount, percent, years):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
