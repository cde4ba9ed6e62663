"""What a deposit is worth after some years."""

import sys


def worth(amount, percent, years):
    interest = amount * percent / 100
    return amount + interest * years


if __name__ == "__main__":
    amount, percent, years = sys.argv[1:]
    print(f"{worth(float(amount), float(percent), int(years)):.2f}")
