"""Microbenchmarks of one GPU or one CPU: bandwidth, GEMM at few rows, verify attention, experts, overheads, whole passes.

    python -m microbench --device cuda --budget 240 --out DIR

measures and keeps raw samples (DIR/raw.jsonl); `draftline calibrate` measures and fits a profile from them. torch, triton and cupy are
loaded only by the functions that need them, so plans, statistics and raw files work without.
"""
