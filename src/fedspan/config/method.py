"""The method of a run, and the wrappers around it, as the user writes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedspan.config.options import method_options, wrapper_options
from fedspan.core.method import Method, RegisteredMethod
from fedspan.core.values import OptimizerSpec, Spec
from fedspan.methods.registry import method_class
from fedspan.wrappers.extras import ExtrasPolicy, WithExtras
from fedspan.wrappers.registry import wrap

__all__ = ["MethodConfig", "WrapperConfig"]


class WrapperConfig(BaseModel):
    """A wrapper, and any of its options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(description="Key of the wrapper; fedspan methods lists them.")

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, dict | WrapperConfig):
            raise ValueError("a key of fedspan methods, or {name: KEY} with options beside it")
        return value

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside the name."""
        return dict(self.model_extra or {})


class MethodConfig(BaseModel):
    """The method, and any of its options (``fedspan methods`` lists both)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(default="fedit", description="Key of the method; fedspan methods lists them.")
    wrappers: list[WrapperConfig] = Field(
        default_factory=list,
        description="Wrappers around it, from the inside out: a key of fedspan methods, or with options {name: "
        "fedprox, mu: 0.1}.",
    )

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside the name and the wrappers."""
        return dict(self.model_extra or {})

    @property
    def title(self) -> str:
        """The method with its wrappers, as the tables name it: ``fedit+fedprox``."""
        return "+".join([self.name, *(wrapper.name for wrapper in self.wrappers)])

    def build(self, spec: Spec, seed: int) -> RegisteredMethod:
        """The method alone.

        Raises:
            FedspanError: for options that it does not have, or values that they don't take.
        """
        options = method_options(self.name, self.options)
        return method_class(self.name)(spec=spec, seed=seed, **options)

    def wrapped(
        self,
        method: RegisteredMethod,
        policy: ExtrasPolicy | None,
        extras_lr_scale: float,
        optimizer: OptimizerSpec,
        max_grad_norm: float,
    ) -> Method:
        """A method with the extras and, around both, the wrappers.

        Args:
            method: what ``build`` gave.
            policy: of the extras; None: the method's own.
            extras_lr_scale: multiplier on their learning rate.
            optimizer: of local training.
            max_grad_norm: of local training (0: none).

        Raises:
            FedspanError: for a wrapper or an option that there is not, or a combination that does not hold.
        """
        options = [
            (wrapper.name, wrapper_options(position, wrapper.name, wrapper.options))
            for position, wrapper in enumerate(self.wrappers)
        ]
        extras = WithExtras(inner=method, policy=policy or method.claims.extras, lr_scale=extras_lr_scale)
        return wrap(extras, options, method.seed, optimizer, max_grad_norm)
