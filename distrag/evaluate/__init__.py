"""Metrics that do not depend on the number of ranks: full ranking of held-out items, binary labels, popularity."""

from distrag.evaluate.binary import BinaryEvaluator, binary_metrics
from distrag.evaluate.catalogue import Catalogue, build_catalogue
from distrag.evaluate.popularity import evaluate_popularity
from distrag.evaluate.ranking import HeldOut, RankingEvaluator, ranking_metrics
from distrag.evaluate.scoring import Tile, rank_targets

__all__ = [
    "BinaryEvaluator",
    "Catalogue",
    "HeldOut",
    "RankingEvaluator",
    "Tile",
    "binary_metrics",
    "build_catalogue",
    "evaluate_popularity",
    "rank_targets",
    "ranking_metrics",
]
