"""`outrider certify`: is an engine lossless? Ours, or any other.

subjects     what can be certified, and what a certificate asks of it
exact        verifier functions: enumeration in rational arithmetic
seeded       engines that promise tokens: identical texts, every difference classified
statistical  engines that promise a distribution: joint distributions and a bound on the deviation
audit        a test that may stop at any time, on texts and the target's probabilities; it names the mistake
contract     sampling parameters and bookkeeping
quality      the share of HumanEval's problems that texts solve
run          budget, journal, resumption
certificate  the result as data; page: as HTML
"""
