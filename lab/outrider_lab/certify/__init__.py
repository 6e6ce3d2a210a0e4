"""What `outrider certify` adds to `outrider_certify`: subjects in this process.

engine       a model with a speculative_config
exact        verifier functions: enumeration in rational arithmetic, with rules of known mistakes
"""
