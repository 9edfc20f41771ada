"""What the router of a model has before anything is built on it: the first step of its assembly."""

from dataclasses import dataclass

from redis.asyncio import Redis

from kvroute.contract.unreadable import Unreadable
from kvroute.features import UNREADABLE
from kvroute.features.gate import Gate
from kvroute.process.surroundings import Surroundings
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.settings.router import RouterSettings
from kvroute.store.clusters import ClusterModel
from kvroute.store.connection import connect
from kvroute.store.index import Index


@dataclass(frozen=True, slots=True, eq=False)
class RouterBase:
    """The router of one model without its parts. All of it can be used at once."""

    router_id: str
    settings: RouterSettings  # for this model
    tokenizer: Prompts  # the model's tokenizer and template
    redis: Redis
    unreadable: Unreadable  # counts what this router cannot read in Redis
    index: Index
    gate: Gate  # decides who may send requests to the router
    own: ClusterModel  # the entry that tells other clusters which model this cluster serves
    surroundings: Surroundings

    @property
    def model(self) -> str:
        """Return the model name that clients send."""
        return self.settings.served_model_name

    @property
    def cluster(self) -> str:
        """Return the cluster's id."""
        return self.settings.cluster

    @property
    def origin(self) -> str:
        """Return a name of what this router belongs to, for other routers."""
        return f"{self.own.ray_address}/{self.own.application}"


def router_base(
    router_id: str,
    settings: RouterSettings,
    tokenizer: Prompts,
    gate: Gate,
    surroundings: Surroundings,
) -> RouterBase:
    """Return the base of a router in this process."""
    redis, unreadable = connect(settings.redis_url), Unreadable(UNREADABLE)
    model, cluster = settings.served_model_name, settings.cluster
    return RouterBase(
        router_id,
        settings,
        tokenizer,
        redis,
        unreadable,
        Index(redis, model, cluster=cluster, unreadable=unreadable),
        gate,
        ClusterModel(cluster, model, surroundings.cluster_address, surroundings.application),
        surroundings,
    )
