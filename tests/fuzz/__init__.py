"""Random graphs around our operations, run in several ways that must agree: `python -m tests.fuzz
--help`.
"""
