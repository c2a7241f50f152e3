"""Fuzz labels, counts and cross-entropy against sums written out in Python."""

import math
import random
from typing import Any

import torch
from tests.fuzz.judge import check, judge, sound
from tests.fuzz.oddities import anything, mutate

from longpack import PackedRow
from longpack.loss import count_targets, cross_entropy, next_token_targets


def loss_case(rng: random.Random) -> str:
    row = PackedRow.from_lengths([rng.randint(1, 5) for _ in range(rng.randrange(4))], 2)
    labels: Any = torch.randint(0, 5, (row.length,))
    logits: Any = torch.randn(row.length, 5, dtype=rng.choice([torch.float32, torch.float64]))
    divide: Any = None
    kind = rng.random()
    if kind < 0.3:
        labels = mutate(rng, labels)
    elif kind < 0.6:
        logits = mutate(rng, logits)
    elif kind < 0.7:
        divide = rng.choice([0, -1, 2.5, math.nan, 2, anything(rng)])
    with sound(kind >= 0.7):
        targets = next_token_targets(labels, row)
        count = count_targets(targets)
        divide = count if divide is None else divide
        loss = cross_entropy(logits, targets, divide)
    expected = [-100] * row.length
    for start, stop in row.documents:
        expected[start : stop - 1] = labels[start + 1 : stop].tolist()
    check(targets.tolist() == expected, targets, "is not", expected)
    check(count == max(1, sum(t != -100 for t in expected)), "counted", count)
    scores = logits.detach().double().reshape(row.length, -1).tolist()
    total = 0.0
    for each, target in zip(scores, expected, strict=True):
        if target != -100:
            top = max(each)
            total += top - each[target] + math.log(sum(math.exp(x - top) for x in each))
    error = abs(loss.item() - total / divide)
    exact = error <= 1e-5 * max(1.0, abs(total))
    check(exact or not math.isfinite(total), "loss", loss.item(), "is not", total / divide)
    return "right"


def test_losses():
    judge("loss", loss_case)
