"""MovieLens-1M as clicks, from GroupLens's archive: the log of the study in the README.

Every rated (user, movie) pair has label 1; beside it stands one movie, drawn uniformly from those
that the user has not rated, with label 0. So the data says what users watch, not what they like.
Columns: label, user, movie, genres ("Action|Comedy"), decade (199: the 1990s); rows are shuffled.

    curl -LO https://files.grouplens.org/datasets/movielens/ml-1m.zip
    python benchmarks/movielens_clicks.py ml-1m.zip movielens1m.csv.gz
    merlin-cowclip prepare benchmarks/movielens1m.toml movielens1m.csv.gz --out data

The data's licence forbids redistribution. F. M. Harper and J. A. Konstan (2015). The MovieLens
Datasets: History and Context. ACM Transactions on Interactive Intelligent Systems 5, 4, 19.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd

RATINGS, MOVIES = "ml-1m/ratings.dat", "ml-1m/movies.dat"


def clicks(ratings: pd.DataFrame, movies: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """The log.

    Args:
      ratings: columns `user` and `movie`, a row per rating.
      movies: columns `movie`, `title` ("Toy Story (1995)") and `genres`.
      seed: of the movies that were not rated, and of the order.

    Raises:
      ValueError: somebody rated every movie, or one that is not among `movies`.
    """
    random = np.random.default_rng(seed)
    rated = ratings[["user", "movie"]].drop_duplicates(ignore_index=True)
    known = pd.Index(np.sort(rated["movie"].unique()))
    if not known.isin(movies["movie"]).all():
        raise ValueError(f"rated movies must be among {MOVIES}")
    if rated.groupby("user").size().max() == len(known):
        raise ValueError("every user must have a movie that they have not rated")
    users, user = np.unique(rated["user"], return_inverse=True)
    taken = np.unique(user * len(known) + known.get_indexer(rated["movie"]))
    drawn = np.full(len(rated), -1)
    missing = np.arange(len(rated))
    while len(missing):  # by rejection, which is uniform over what is left
        drawn[missing] = random.integers(len(known), size=len(missing))
        missing = missing[np.isin(user[missing] * len(known) + drawn[missing], taken)]
    others = pd.DataFrame({"user": users[user], "movie": known[drawn]})
    log = pd.concat([rated.assign(label=1), others.assign(label=0)], ignore_index=True)
    years = movies["title"].str.extract(r"\((\d{4})\)\s*$")[0].astype(int)
    about = movies.assign(decade=years // 10)[["movie", "genres", "decade"]]
    log = log.merge(about, on="movie", how="left", validate="many_to_one")
    order = random.permutation(len(log))
    return log.iloc[order][["label", "user", "movie", "genres", "decade"]]


def read(archive: zipfile.ZipFile, name: str, columns: list[str]) -> pd.DataFrame:
    """A table of the archive."""
    with archive.open(name) as file:
        return pd.read_csv(file, sep="::", engine="python", names=columns, encoding="latin-1")


def main() -> None:
    """Write the log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="ml-1m.zip")
    parser.add_argument("out", type=Path, help="the log to write, .csv or .csv.gz")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    arguments = parser.parse_args()
    if arguments.out.exists():
        sys.exit(f"out must not exist. Received: {arguments.out}. Name another file")
    try:
        with zipfile.ZipFile(arguments.archive) as archive:
            ratings = read(archive, RATINGS, ["user", "movie", "rating", "time"])
            movies = read(archive, MOVIES, ["movie", "title", "genres"])
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(
            f"the archive must be GroupLens's ml-1m.zip. Received: {arguments.archive}: {error}"
        )
    log = clicks(ratings, movies, arguments.seed)
    log.to_csv(arguments.out, index=False)
    print(f"{len(log):,} rows, {log['user'].nunique():,} users, {log['movie'].nunique():,} movies")


if __name__ == "__main__":
    main()
