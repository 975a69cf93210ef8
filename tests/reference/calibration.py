"""Temperature and thresholds of confidence by plain loops."""

from __future__ import annotations

import math


def tempered(row: list[float], temperature: float) -> list[float]:
    powers = [value ** (1 / temperature) for value in row]
    return [value / sum(powers) for value in powers]


def temperature_loss(rows: list[list[float]], labels: list[int], temperature: float) -> float:
    total = math.log(temperature) ** 2 / 2
    for row, label in zip(rows, labels, strict=True):
        total -= math.log(tempered(row, temperature)[label])
    return total


def upper_limit(wrong: int, count: int, certainty: float) -> float:
    """The largest error rate at which at most `wrong` errors of `count` still have a probability of 1 - certainty."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        chance = sum(math.comb(count, number) * rate**number * (1 - rate) ** (count - number) for number in range(wrong + 1))
        low, high = (rate, high) if chance > 1 - certainty else (low, rate)
    return high if wrong < count else 1.0


def confidence_for(confidences: list[float], right: list[bool], error: float, certainty: float) -> float | None:
    """The lowest confidence in hundredths above which the error is at most `error`, by its upper limit."""
    for level in range(100):
        answers = [hit for value, hit in zip(confidences, right, strict=True) if int(value * 100) >= level]
        if answers and upper_limit(answers.count(False), len(answers), certainty) <= error:
            return level / 100
    return None
