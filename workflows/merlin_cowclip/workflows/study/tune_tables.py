"""What a tune tells: a line per trial, and the tables at its end. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.study.search_space import Point

_OF_CLIP = ("clip", "r", "ζ")
_VALUES = ("dense η", "embedding η", "λ", "σ", "warm-up", *_OF_CLIP, "update", "rates")


def values_in_words(point: Point) -> str:
    """A point in one line."""
    hp = point.hyperparameters
    clip = "no clip"
    if hp.clip is not None:
        clip = f"clip r {hp.clip_ratio:.3g}, ζ {hp.clip_floor:.3g}"
    return (
        f"dense {hp.dense_lr:.3g}, embedding {hp.embedding_lr:.3g}, λ {hp.l2:.3g}, "
        f"σ {hp.init_stddev:.3g}, warm-up {hp.warmup_epochs:.3g}, {clip}, {point.update}, "
        f"{point.rates} rates"
    )


def trial_line(trial: Any, tried: Sequence[Any], most: int) -> str:
    """A trial that has ended, a `Tried`, of all that have, and of how many are to.

    Its number is the search's: one that was interrupted is tried again under another.
    """
    rules = f" ({', '.join(trial.rules)})" if trial.rules else ""
    if trial.epochs:
        auc = f"held-out AUC {trial.auc:.5f}, epoch {trial.best_epoch} of {len(trial.epochs)}"
    else:
        auc = "no epoch"
    why = f", {brief(trial.why)}" if trial.why else ""
    best = max(tried, key=lambda one: one.auc)
    so_far = f"; best {best.auc:.5f}, trial {best.number + 1}" if best.epochs else ""
    return (
        f"trial {trial.number + 1}, {len(tried)} of {most} ended: {auc}, {trial.seconds:.0f} s"
        f"{why}; {values_in_words(trial.point)}{rules}{so_far}"
    )


def brief(why: str) -> str:
    """Why a trial ended, for a line: of what diverged the reason is in the result."""
    return "diverged" if len(why) > 40 else why


def tables(result: Mapping[str, Any]) -> str:
    """The tables at a tune's end.

    Args:
      result: `result.json`'s.
    """
    rows, values = [], []
    for row in result["table"]:
        mean, deviation = row["mean"], row["deviation"]
        rows.append(
            (
                row["what"],
                "diverged" if row["diverged"] or _has_none(row) else _auc(mean),
                _plus_minus(deviation),
                _difference(row),
                str(len(row["seeds"])),
                _auc(row["search_auc"]),
                str(row["epochs"] or ""),
            )
        )
        hp = row["hyperparameters"]
        clip = ("no", "", "")
        if hp["clip"] is not None:
            clip = ("yes", f"{hp['clip_ratio']:.3g}", f"{hp['clip_floor']:.3g}")
        numbers = ("dense_lr", "embedding_lr", "l2", "init_stddev", "warmup_epochs")
        of_hp = (f"{hp[name]:.3g}" for name in numbers)
        values.append((row["what"], *of_hp, *clip, row["update"], row["rates"]))
    lines = [
        format_table(
            ("", "held-out AUC", "±", "to the best", "seeds", "in the search", "epochs"), rows
        ),
        "",
        format_table(("", *_VALUES), values),
        "",
        importance_line(result["importance"], result["trials_measured"]),
    ]
    diverged = [
        f"{row['what']} from {row['diverged']} of {len(row['seeds'])} seeds"
        for row in result["table"]
        if row["diverged"]
    ]
    if diverged:
        lines.append(f"Diverged when trained again: {'; '.join(diverged)}.")
    if result["table"][0]["diverged"]:
        lines.append("So did all that were trained again: search among lower learning rates.")
    if result["not_tried"]:
        names = ", ".join(result["not_tried"])
        lines.append(f"Not tried, as the trials or the time were over: {names}.")
    return "\n".join(lines)


def importance_line(importance: Mapping[str, float] | None, trials: int) -> str:
    """The sentence on what the AUC hung on."""
    if importance is None:
        return f"Importance of the values: too few trials to say ({trials}; 10 at least)."
    shares = ", ".join(f"{name} {share:.0%}" for name, share in importance.items())
    return f"Importance of the values, over {trials} trials (fANOVA): {shares}."


def _has_none(row: Mapping[str, Any]) -> bool:
    """Whether it has no AUC at all: it diverged in the search, too."""
    return row["mean"] is None and row["search_auc"] is None


def _auc(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


def _plus_minus(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


def _difference(row: Mapping[str, Any]) -> str:
    if row["difference"] is None:
        return ""
    deviation = row["difference_deviation"]
    return f"{row['difference']:+.5f}" + ("" if deviation is None else f" ± {deviation:.5f}")
