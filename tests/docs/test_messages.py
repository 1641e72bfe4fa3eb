"""What the list of messages finds in source, and that no message of ours is missed."""

from __future__ import annotations

import ast
import re

import pytest

from .conftest import ROOT, error_messages


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise UserError("a row must be whole")', ["a row must be whole"]),
        ('raise ValueError(f"{n} must be 1. " + f"Received: {x!r}")', ["… must be 1. Received: …"]),
        ('raise UserError("a" + ("b" if c else f"c {d}"))', ["ab", "ac …"]),
        ('def f():\n x = "ids" if a else "rows"\n raise OSError(f"no {x}")', ["no ids", "no rows"]),
        ('def f():\n what = g()\n raise OSError(f"no {what}")', ["no …"]),
        ('return UserError("elsewhere")', ["elsewhere"]),
        ('raise UserError(str(error))', []),
        ('raise Stopped("after update 3", number)', ["after update 3"]),
        ('warnings.warn("half is left", Notice)', ["half is left"]),
        ('_say(f"{name}: error: nothing is left")', ["nothing is left"]),
        ('print("all is well")', []),
        ('def no(x): raise Error(f"no {x} of {y}")\nno("a")\nno(n)', ["no a of …", "no … of …"]),
        ('A = "never"\ndef no(what): return UserError(f"{what} {x}")\nno(A)', ["never …"]),
        ('A = {1: ("x", "y")}\ndef f():\n for _, (a, b) in A.items(): Error(f"{a} {b}")', ["x y"]),
        ('tf.debugging.Assert(ok, ["ids must be small", ids])', ["ids must be small"]),
        ('def f():\n said = ["ids must be 1"]\n Assert(ok, data=said)', ["ids must be 1"]),
    ],
)  # fmt: skip
def test_what_is_found(source, found):
    assert [text for text, _ in error_messages.within(ast.parse(source))] == found


def test_the_list_has_what_tests_expect():
    """Messages of each floor, as tests elsewhere quote them."""
    listed = {message.text for message in error_messages.messages(ROOT)}
    for text in (
        "label must be 0 or 1. Received: … in …, …, column …. Correct the row or remove it",
        "clip must be None or one of …. Received: clip=…",
        "ids must be from 0 to cardinality - 1. Field, cardinality, received:",
        "Rows can catch up with steps that they missed where learning_rate * l2 is at most epsilon "
        "* (1 + beta_1) / (1 - beta_1), …: beyond, Adam throws them about zero. Received: …. Use "
        "update='exact', or a smaller l2",
    ):
        assert text in listed, sorted(one for one in listed if one[:9] == text[:9])


def test_each_message_has_words_and_a_section():
    found = error_messages.messages(ROOT)
    assert sum(len(own) for own in error_messages.by_section(found).values()) == len(found)
    wordless = [one for one in found if len(re.findall(r"[A-Za-z]{2,}", one.text)) < 2]
    assert not wordless, "a message of values alone cannot be found by its words"
