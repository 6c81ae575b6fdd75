"""A rank among its neighbours: it meets them, agrees with them on the run, and takes its post."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

from isthmus.job import Job
from isthmus.train.agreement import Offer, Start, agree_on_end, agree_on_step, pass_offer_on
from isthmus.train.course import Course, Post
from isthmus.train.ranks.world import World
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.link import Link

_PATIENCE_S: Final = 5.0
"""A neighbour that has not come by then is named."""


class Neighbours:
    """The stages before and behind one; leaders speak to each other, and tell the ranks of their cloud."""

    def __init__(self, endpoint: Endpoint, world: World, *, clouds: Sequence[str], cloud: str) -> None:
        self.index = clouds.index(cloud)
        """Of this rank's own stage."""
        self._endpoint = endpoint
        self._world = world
        self._clouds = clouds
        self.up = self._leaders_link(self.index - 1)
        """The leaders' link to the stage before; None at other ranks and at the first stage."""
        self.down = self._leaders_link(self.index + 1)

    def meet(self, job: Job, *, note: Callable[[str], None]) -> None:
        """Wait for the neighbours; say whom this cloud waits for, once it has waited a little."""
        for link in filter(None, (self.up, self.down)):
            try:
                link.wait_ready(timeout_s=_PATIENCE_S)
            except TimeoutError:
                peer = job.cloud_named(link.peer.cloud)
                place = f" at {peer.listen}" if peer.listen is not None else ""
                note(f"waiting for cloud {peer.name!r}{place}")
                link.wait_ready()

    def agree_on_offer(self, own: Offer | None) -> Offer:
        """What the first cloud, whose leader alone has an offer, runs."""
        words = None
        if self._world.seat.is_leader:
            words = asdict(pass_offer_on(own, up=self.up, down=self.down))
        return Offer(**self._world.spread(words))

    def agree_on_start(self, saved: Sequence[int]) -> Start:
        """Where the run begins, by the steps that every cloud has saved."""
        words = None
        if self._world.seat.is_leader:
            words = asdict(agree_on_step(set(saved), up=self.up, down=self.down))
        return Start(**self._world.spread(words))

    def agree_on_end(self) -> None:
        """Wait until every rank of every cloud has come to the end."""
        self._world.gather(None)
        if self._world.seat.is_leader:
            agree_on_end(up=self.up, down=self.down)
        self._world.spread(None)

    def post(self, course: Course) -> Post:
        """Where this rank stands, with its links to every rank that it will speak to."""
        return Post(
            cloud=self._clouds[self.index],
            index=self.index,
            rank=self._world.seat.rank,
            up=self.up,
            down=self.down,
            ups=self._links(course, self.index - 1),
            downs=self._links(course, self.index + 1),
        )

    def _leaders_link(self, stage: int) -> Link | None:
        if not self._world.seat.is_leader or not 0 <= stage < len(self._clouds):
            return None
        return self._endpoint.link(self._clouds[stage])

    def _links(self, course: Course, stage: int) -> dict[int, Link]:
        if not 0 <= stage < course.num_stages:
            return {}
        peers = course.routing.peers(self.index, self._world.seat.rank, neighbour=stage)
        return {peer: self._endpoint.link(self._clouds[stage], peer) for peer in peers}
