"""Real speculative decoding: a small engine that runs anywhere, models that ship with it, and the harness that compares predicted with measured.

Modules here import torch; nothing outside imports them before they are called.
"""
