"""C++ code generation that the backends with their own kernels share.

elements.py      an element of a value as C++; indices.py, statements.py: what that is made of
product_plan.py  what a product's kernel does; epilogue.py, sums.py, router.py, orders.py: parts
writer.py        a segment's struct
"""

from .elements import Elements, scale_class, stored
from .epilogue import Epilogue
from .indices import (
    Call,
    Index,
    Number,
    Variable,
    flat,
    follow,
    is_index,
    reshaped,
    size,
    unflat,
)
from .orders import order_struct
from .product_plan import (
    ACTIVATIONS,
    ProductPlan,
    WgradPlan,
    base_of,
    below,
    is_made_first,
    known,
    made_by_route,
    need_one_width,
    plan_product,
    plan_wgrad,
)
from .statements import (
    Expression,
    Statement,
    branches,
    formula,
    hoisted,
    indented,
    inner,
    written,
)
from .sums import reduction
from .writer import Writer

__all__ = [
    "ACTIVATIONS",
    "Call",
    "Elements",
    "Epilogue",
    "Expression",
    "Index",
    "Number",
    "ProductPlan",
    "Statement",
    "Variable",
    "WgradPlan",
    "Writer",
    "base_of",
    "below",
    "branches",
    "flat",
    "follow",
    "formula",
    "hoisted",
    "indented",
    "inner",
    "is_index",
    "is_made_first",
    "known",
    "made_by_route",
    "need_one_width",
    "order_struct",
    "plan_product",
    "plan_wgrad",
    "reduction",
    "reshaped",
    "scale_class",
    "size",
    "stored",
    "unflat",
    "written",
]
