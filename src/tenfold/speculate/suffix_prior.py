from __future__ import annotations
from tenfold._native import SUFFIX_BUCKETS

def prior() -> list[float]:
    sources, others, lengths, shares = SUFFIX_BUCKETS
    out = []
    for s in range(sources):
        for o in range(others):
            for l in range(lengths):
                for h in range(shares):
                    out.append(min(.95, max(.05, .2 + .09*l + (.15,.0,.1,.2,.25)[h] + (0,.15,-.2)[o] - (.1 if s else 0))))
    return out
