"""The trials of a tune as JSON, without its rows: to publish them, or to go on with them elsewhere.

A search takes hours, and its folder holds the rows that it trains on. Where those may not be given
away, or a machine has not the time, another one prepares the same data, begins the same tune, and
adds what was tried before:

    python benchmarks/trials.py TUNE > trials.json
    python benchmarks/trials.py TUNE --add trials.json

Trials in progress are left out. Those that are there already are not added twice, and what waits to
be tried and is among them is not tried again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.tuned import read_record

SAME = ("data_sha256", "config")
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


def study_of(tune: Path) -> optuna.Study:
    return optuna.load_study(study_name="tune", storage=f"sqlite:///{tune.absolute() / 'study.db'}")


def trials_of(tune: Path) -> dict[str, Any]:
    """What was tried, in order, and on what."""
    ended = study_of(tune).get_trials(states=ENDED)
    record = read_record(tune)
    return {**{key: record[key] for key in SAME}, "trials": [_described(trial) for trial in ended]}


def _described(trial: FrozenTrial) -> dict[str, Any]:
    ranges = {name: distribution_to_json(found) for name, found in trial.distributions.items()}
    return {
        "state": trial.state.name,
        "params": trial.params,
        "auc_after_epoch": trial.intermediate_values,
        "value": trial.value,
        "ranges": {name: json.loads(found) for name, found in ranges.items()},
        "notes": trial.user_attrs,
    }


def add(tune: Path, given: dict[str, Any]) -> int:
    """Add trials to a tune that has been begun; how many there were to add.

    Raises:
        UserError: it tunes something else.
    """
    record = read_record(tune)
    for key in SAME:
        if record[key] != given[key]:
            raise UserError(
                f"trials belong to a tune of the same data and options. Received: {key} "
                f"{given[key]!r} for {tune}, with {record[key]!r}. Begin that tune there"
            )
    study = study_of(tune)
    there = [trial.params for trial in study.get_trials(states=ENDED)]
    more = [trial for trial in given["trials"] if trial["params"] not in there]
    study.add_trials([_made(trial) for trial in more])
    for waiting in study.get_trials(states=(TrialState.WAITING,)):
        if waiting.system_attrs["fixed_params"] in [trial["params"] for trial in more]:
            study._storage.set_trial_state_values(waiting._trial_id, TrialState.FAIL)
    return len(more)


def _made(trial: dict[str, Any]) -> FrozenTrial:
    ranges = {name: json_to_distribution(json.dumps(r)) for name, r in trial["ranges"].items()}
    return create_trial(
        state=TrialState[trial["state"]],
        params=trial["params"],
        distributions=ranges,
        intermediate_values={int(n): auc for n, auc in trial["auc_after_epoch"].items()},
        value=trial["value"],
        user_attrs=trial["notes"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tune", type=Path, help="the folder of a tune, begun or ended")
    parser.add_argument("--add", type=Path, metavar="FILE", help="trials to add to it")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        if arguments.add is None:
            json.dump(trials_of(arguments.tune), sys.stdout, indent=1)
            print()
        else:
            added = add(arguments.tune, json.loads(arguments.add.read_text(encoding="utf-8")))
            print(f"{added} trials more: {arguments.tune}")
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
