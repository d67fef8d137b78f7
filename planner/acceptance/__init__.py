"""Acceptance: the survival curve of drafts, how it carries between draft lengths, and what to expect before measuring."""

from planner.acceptance.priors import WORKLOADS, Prior, workload_prior
from planner.acceptance.survival import Survival, isotonic, survival_from
from planner.acceptance.transfer import KINDS, Law, band, carry, fit_transfer, law_for, leave_out_table

__all__ = [
    "KINDS",
    "WORKLOADS",
    "Law",
    "Prior",
    "Survival",
    "band",
    "carry",
    "fit_transfer",
    "isotonic",
    "law_for",
    "leave_out_table",
    "survival_from",
    "workload_prior",
]
