"""The method of a run and its wrappers, as written in the config."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedspan.config.options import validate_method_options, validate_wrapper_options
from fedspan.core.method import Method, RegisteredMethod
from fedspan.core.values import OptimizerSpec, Spec
from fedspan.methods.registry import get_method_class
from fedspan.wrappers.extras import ExtrasPolicy, WithExtras
from fedspan.wrappers.registry import wrap


class WrapperConfig(BaseModel):
    """A wrapper, and any of its options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(description="Key of the wrapper; fedspan methods lists them.")

    @model_validator(mode="before")
    @classmethod
    def _parse_key(cls, value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, dict | WrapperConfig):
            raise ValueError("a key of fedspan methods, or {name: KEY} with options beside it")
        return value

    @property
    def options(self) -> dict[str, Any]:
        """All fields except the name."""
        return dict(self.model_extra or {})


class MethodConfig(BaseModel):
    """The method, and any of its options (``fedspan methods`` lists both)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(default="fedit", description="Key of the method; fedspan methods lists them.")
    wrappers: list[WrapperConfig] = Field(
        default_factory=list,
        description="Wrappers around the method, from the inside out: keys of fedspan methods, or with options "
        "{name: fedprox, mu: 0.1}.",
    )

    @property
    def options(self) -> dict[str, Any]:
        """All fields except the name and the wrappers."""
        return dict(self.model_extra or {})

    @property
    def title(self) -> str:
        """The method with its wrappers, as the tables name it: ``fedit+fedprox``."""
        return "+".join([self.name, *(wrapper.name for wrapper in self.wrappers)])

    def build(self, spec: Spec, seed: int) -> RegisteredMethod:
        """Build the method without wrappers.

        Raises:
            FedspanError: If an option is unknown, or its value is invalid.
        """
        options = validate_method_options(self.name, self.options)
        return get_method_class(self.name)(spec=spec, seed=seed, **options)

    def wrap(
        self,
        method: RegisteredMethod,
        policy: ExtrasPolicy | None,
        extras_lr_scale: float,
        optimizer: OptimizerSpec,
        max_grad_norm: float,
    ) -> Method:
        """Wrap a method and the extras in the run's wrappers.

        Args:
            method: The method that ``build`` returned.
            policy: Policy of the extras; None: the method's own.
            extras_lr_scale: Multiplier on the extras' learning rate.
            optimizer: Optimizer of local training.
            max_grad_norm: Clipping norm of local training (0: none).

        Raises:
            FedspanError: If a wrapper or an option is unknown, or the combination is invalid.
        """
        options = [
            (wrapper.name, validate_wrapper_options(position, wrapper.name, wrapper.options))
            for position, wrapper in enumerate(self.wrappers)
        ]
        extras = WithExtras(inner=method, policy=policy or method.claims.extras, lr_scale=extras_lr_scale)
        return wrap(extras, options, method.seed, optimizer, max_grad_norm)
