"""Scripts that run one engine each, under whatever interpreter has it installed.

A script imports nothing of sagc_fast but its neighbours here (this package's own engine and trainer apart),
reads one JSON object a line and answers each with one. It does exactly the work asked for, one run at a time, so that
engines can take turns. Each notes the settings without which its engine would be slower or fail.
"""
