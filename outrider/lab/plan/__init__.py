"""Planning: what a model needs on other hardware, from data sheets or measurements, acceptance, and a simulator.

acceptance_curve  how many draft tokens are accepted, from a report, a trace or a rate
planned_model     the sizes of a model
serving_costs     seconds of rounds and prompts: rooflines, or measured
workload          requests per second and their lengths
simulation        replicas that batch continuously and speculate
serving_plan      batch sizes, fleets and forecasts
answer            the answer with its formulas
"""
