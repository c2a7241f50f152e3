"""Two runs compared module by module."""

import torch

from longpack.verify.locate import Call, first_departure, flipped_decisions

ROWS = torch.tensor([True, True, False])


def call(path, given, out):
    return Call(path, {"0.0": torch.tensor(given)}, {"out.0": torch.tensor(out)})


def trace(*calls):
    return {(c.path, 0): c for c in calls}


def test_the_module_that_makes_a_difference_and_not_those_that_pass_it_on():
    theirs = trace(call("a", [1.0, 1, 1], [2.0, 2, 2]), call("b", [2.0, 2, 2], [3.0, 3, 3]))
    ours = trace(call("a", [1.0, 1, 1], [2.0, 5, 2]), call("b", [2.0, 5, 2], [3.0, 6, 3]))
    assert first_departure(ours, theirs, ROWS, 1e-3) == ("a", True, "")
    given = trace(call("a", [1.0, 4, 1], [2.0, 5, 2]))
    assert first_departure(given, theirs, ROWS, 1e-3) == ("a", False, "")
    whole = trace(call("a", [1.0, 4, 1], [2.0, 5, 2]), call("b", [2.0, 2, 2], [3.0, 6, 3]))
    assert first_departure(whole, theirs, ROWS, 1e-3) == ("b", True, "a")


def test_rows_that_may_differ_and_rounding_do_not_count():
    theirs = trace(call("a", [1.0, 1, 1], [2.0, 2, 2]))
    ours = trace(call("a", [1.0, 1, 1], [2.0, 2.0001, 9]))
    assert first_departure(ours, theirs, ROWS, 1e-3) is None


def test_nan_is_a_difference():
    theirs = trace(call("a", [1.0, 1, 1], [2.0, 2, 2]))
    ours = trace(call("a", [1.0, 1, 1], [2.0, float("nan"), 2]))
    assert first_departure(ours, theirs, ROWS, 1e-3) == ("a", True, "")


def test_decisions_are_integers_that_a_module_gives():
    theirs = trace(call("gate", [1.0, 1, 1], [0, 1, 1]), call("mlp", [1.0, 1, 1], [1.0, 2, 3]))
    ours = trace(call("gate", [1.0, 1, 1], [0, 0, 0]), call("mlp", [1.0, 1, 1], [1.0, 9, 3]))
    assert flipped_decisions(ours, theirs, ROWS) == {"gate": 1}
