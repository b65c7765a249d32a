"""The configuration of a run, whose options fit together, and the settings that are built from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, cast

from pydantic import model_validator

from fedspan.config.combinations import explain_random_head, require_combination
from fedspan.config.sections import RunSections
from fedspan.core.factors import require_rank
from fedspan.core.heads import HeadKind
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Spec
from fedspan.errors import FedspanError
from fedspan.federation.config import RoundSettings

if TYPE_CHECKING:
    from fedspan.data.loading import LoadedData
    from fedspan.data.source import Source


class RunConfig(RunSections):
    """The configuration of one run.

    Examples:
        >>> config = fedspan.load_config("config.yaml", ["federation.rounds=20"])
        >>> config.method.name, config.federation.rounds
    """

    @model_validator(mode="after")
    def _validate_combination(self) -> Self:
        require_combination(self)
        return self

    @property
    def head_kind(self) -> tuple[HeadKind | None, str | None]:
        """Kind of start of the head (None: random), and the reason if ``auto`` does without statistics."""
        requested = self.model.head_init
        if requested == "random":
            return None, None
        starts = self.task_definition.head_inits
        if not starts or self.model.is_from_scratch:
            return None, None
        if reason := explain_random_head(self):
            return None, reason
        if requested != "auto":
            return requested, None
        return cast("HeadKind", starts[-1]), None

    @property
    def active_workers(self) -> int:
        """Number of a cluster's workers that a round can occupy; 1 without a cluster."""
        cohort = self.federation.clients_per_round or self.partition.clients
        return 1 if self.cluster is None else max(1, min(self.cluster.workers, cohort or self.cluster.workers))

    def require_simulated(self) -> None:
        """Check that a run on this machine sets nothing that selects nodes, and that its asynchronous rounds are timed.

        Raises:
            FedspanError: If it selects nodes, or neither speeds nor a record time asynchronous rounds.
        """
        has_speeds = self.simulation is not None and self.simulation.speed is not None
        self.federation.require_simulated(has_speeds=has_speeds)

    def build_round_settings(self, key: bytes | None = None) -> RoundSettings:
        """Return the settings of rounds for the engines; ``key`` as in ``build_privacy_settings``."""
        return RoundSettings(**dict(self.federation), seed=self.seed, privacy=self.build_privacy_settings(key))

    def build_simulation_settings(self, key: bytes | None = None) -> RoundSettings:
        """Return the settings of simulated rounds, with trusted clients unless the config asks for more.

        It does so by conditions, secure aggregation, or a rule for accepting replies that is not the default.
        """
        settings, conditions = self.build_round_settings(key), self.simulation
        if conditions is None:
            return settings.trust() if settings.secure is None and settings.has_default_rules else settings
        return settings.model_copy(update={"validates": conditions.validation})

    @property
    def data_seed(self) -> int:
        """Seed of the partition."""
        return self.seed if self.partition.seed is None else self.partition.seed

    def load_examples(self, sources: Mapping[str, Source] | None = None, *, ignores_labels: bool = False) -> LoadedData:
        """Read, check and label the examples that the config names.

        Args:
            sources: Sources of ``train`` and ``test`` that were passed from Python; None: they are read.
            ignores_labels: As in ``data.loading.load``.

        Raises:
            FedspanError: As ``data.loading.load``.
        """
        from fedspan.data.loading import load  # here, because it needs the packages that read files

        return load(
            self.data,
            seed=self.data_seed,
            task=self.task_columns,
            sources=sources,
            client_column=self.partition.column,
            ignores_labels=ignores_labels,
        )

    def build_method(self, spec: Spec) -> RegisteredMethod:
        """Build the method, bound to a model's target layers.

        Raises:
            FedspanError: If its rank is larger than a layer.
        """
        method = self.method.build(spec, self.seed)
        if method.claims.adapter:
            too_large = require_rank(spec, method.r)
            if too_large:
                raise FedspanError(
                    "method.r", method.r, problem=f"{method.r} is larger than a target layer: {too_large}"
                )
        return method
