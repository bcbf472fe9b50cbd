"""Attribution of a logprob gap to regions: replicates, designs and estimates.

Knows no engine: it is given a callable that scores tokens for a set of aligned regions and a noise seed.
"""
