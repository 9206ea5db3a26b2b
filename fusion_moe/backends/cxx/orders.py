"""The orders of items in memory of `layouts.Order`, in C++. Imports no torch: readers.py of the CPU
does not either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...layouts import Order


def order_struct(name: str, order: Order, index: str, qualifiers: str = "") -> list[str]:
    """A struct with the formulas of an order; index: the unsigned type in which they are computed.

    Items [rows, columns] of a matrix take `size`. Item (n, b) lies at of_row(n, columns) +
    of_column(b), and RUN of them follow each other in a row. A tile has TILE items, a row of tiles
    ROWS rows of `width` items with padding.
    """
    (rows, columns), (of_rows, of_columns) = order.tile, order.digits()
    function = f"static constexpr {qualifiers}i64".replace("  ", " ")
    inside = [
        " + ".join(f"u({x}) / {below} % {n} * {stride}" for below, n, stride in digits) or "0"
        for x, digits in (("n", of_rows), ("b", of_columns))
    ]
    return [
        f"struct {name} {{",
        f"    using u = {index};",
        f"    static constexpr int ROWS = {rows}, COLUMNS = {columns}, TILE = {rows * columns}, "
        f"RUN = {order.run};",
        f"    {function} width(i64 columns) {{ return "
        f"i64(u(columns + {columns - 1}) / {columns} * {columns}); }}",
        f"    {function} size(i64 rows, i64 columns) {{ return "
        f"i64(u(rows + {rows - 1}) / {rows} * {rows}) * width(columns); }}",
        f"    {function} of_row(i64 n, i64 columns) {{ return "
        f"i64(u(n) / {rows} * {rows}) * width(columns) + i64({inside[0]}); }}",
        f"    {function} of_column(i64 b) {{ return "
        f"i64(u(b) / {columns} * {rows * columns} + {inside[1]}); }}",
        "};",
    ]
