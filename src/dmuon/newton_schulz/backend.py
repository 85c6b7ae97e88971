"""Names of the ways to iterate: a form of Newton-Schulz and how it multiplies. Pure Python."""

import itertools
from typing import Literal, NamedTuple, get_args

Form = Literal["newton_schulz", "gram"]
Product = Literal["dense", "blocks", "triton", "quack"]


class Backend(NamedTuple):
    """A form of the iteration, and the implementation of its symmetric products.

    Attributes:
        form: "newton_schulz" iterates the matrix itself, "gram" its small Gram matrix.
        product: "dense" computes whole products; "blocks" (CPU), "triton" and "quack" (CUDA) half
            of each, and mirror it.
    """

    form: Form
    product: Product

    def __str__(self) -> str:
        return f"{self.form}+{self.product}"

    @classmethod
    def parse(cls, text: str) -> "Backend":
        """Return the backend of a text such as "gram+triton".

        Raises:
            ValueError: It is unknown.
        """
        for backend in BACKENDS:
            if str(backend) == text:
                return backend
        raise ValueError(f"unknown backend {text!r}; known: {', '.join(map(str, BACKENDS))}")


BACKENDS = tuple(itertools.starmap(Backend, itertools.product(get_args(Form), get_args(Product))))
PLAIN = Backend("newton_schulz", "dense")
