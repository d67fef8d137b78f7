"""Engines over HTTP: recognise, start, load, read the counters of vLLM, SGLang, TensorRT-LLM and llama.cpp's server.

Only loopback, or the address that the user gave, is ever talked to, and every wait has an end. Needs httpx and prometheus-client, no torch.
"""

from planner.verify.remote.arm import Arm, SameTexts, launch_and_measure, measure_arm, same_texts
from planner.verify.remote.client import Endpoint, ServerIdentity, Timeouts, identify
from planner.verify.remote.counters import Observed, Snapshot, check_loaded, observe, snapshot
from planner.verify.remote.launch import Serve, free_port, launched, server_command
from planner.verify.remote.live import LiveAdvice, LiveReading, read_live, recommend_live
from planner.verify.remote.load import Load, LoadSpec, Sent, closed_loop

__all__ = [
    "Arm",
    "Endpoint",
    "LiveAdvice",
    "LiveReading",
    "Load",
    "LoadSpec",
    "Observed",
    "Sent",
    "SameTexts",
    "Serve",
    "ServerIdentity",
    "Snapshot",
    "Timeouts",
    "check_loaded",
    "closed_loop",
    "free_port",
    "identify",
    "launch_and_measure",
    "launched",
    "measure_arm",
    "observe",
    "read_live",
    "recommend_live",
    "same_texts",
    "server_command",
    "snapshot",
]
