"""Traced programs: regions of a graph (regions.py) become Fusions. inductor/ is what
torch.compile calls.

regions.py       calls of a graph that become one Fusion; trim.py: what gains nothing goes back
rewrite.py       regions become calls of `fusion_moe::run`
float_experts.py experts in floats, as products for each expert
reference_semantics.py
                 whether translators are right; compiled.py: graphs kept for reports
"""
