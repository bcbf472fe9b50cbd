"""The command line: one file per command; the only place that prints, and the only user of typer and rich.

Standard output is the answer, as a table or as JSON. Progress, hints and errors go to standard error.
"""
