"""The automatic choice of codecs on a grid of bandwidths: trials, their plans, runs, what came of them."""
