"""Recipes -> fixture checkpoints, prompts, goldens and budgets.

Read in order: ``recipe`` (what is asked), ``generator`` (which bytes), ``forms`` (how the
substitution is declared), ``checkpoint`` (files an engine loads), ``variants`` (the
low-precision runs), ``certificate`` (which prompts are fit to judge), ``golden`` (the
numbers), ``fixture`` (all of it on disk).
"""
