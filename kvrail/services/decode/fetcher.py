"""What a decode worker knows about fetching KV: codecs, transports, links, and which prefill workers answer."""

import logging
from collections.abc import Sequence
from time import monotonic

from kvrail.codec.base import Codec
from kvrail.config.settings import DecodeSettings
from kvrail.errors import InvalidRequestError
from kvrail.services.decode.choice import Chooser
from kvrail.services.decode.fetch_attempt import FetchParts
from kvrail.services.decode.local import LOCAL_FALLBACK_TOKENS, LocalFallbacks, LocalPrefill
from kvrail.services.decode.prefill_workers import AllowedWorkers, Breakers, GrpcPrefillWorkers
from kvrail.services.decode.progress import Progress
from kvrail.transfer.peers import Recent
from kvrail.transport.base import Transport
from kvrail.worker.budgets import mixed_tokens
from kvrail.worker.codecs import AUTO, WITHOUT_CODE, CodecChoiceError, Codecs

logger = logging.getLogger("kvrail.decode")

AVOIDED_S = 300.0
"""A transport by which nothing came from a worker is not offered to it for this long, if there is another."""


class Fetcher:
    """What all fetches of one decode worker share (`PromptFetch` is one of them). Belongs to one event loop.

    allowed: which prefill workers the operator lets requests name. local: what this worker prefills by itself.
    asked_codec: a codec's name, or AUTO; first_codec: what AUTO takes for a link that has not been measured. It is
    usable, as plain bytes are.
    """

    def __init__(
        self,
        parts: FetchParts,
        settings: DecodeSettings,
        codecs: Codecs,
        asked_codec: str,
        first_codec: str,
        workers: GrpcPrefillWorkers,
    ) -> None:
        self.parts = parts
        self.workers = workers
        self.breakers = Breakers()
        self.fallbacks = LocalFallbacks(LOCAL_FALLBACK_TOKENS)
        self.chooser = Chooser(parts.meters.transfers, settings.max_drafts, first_codec)
        self._codecs = codecs
        self._asked_codec = asked_codec
        self.allowed = AllowedWorkers(settings.allowed_prefill_workers)
        self._avoided: Recent[tuple[str, str], float] = Recent()  # until when, by worker and transport
        self.local = LocalPrefill(settings.local_prefill_tokens, mixed_tokens(settings))

    def codec_for(self, asked: str, *, exact: bool = False) -> str:
        """Name of the codec of a request that asked for this one, or for none; or AUTO.

        exact: the codec has to restore every bit; AUTO takes the place of a lossy one that no request asked for.
        Raises InvalidRequestError if it cannot be had.
        """
        name = asked or self._asked_codec
        if name == AUTO:
            return AUTO
        try:
            codec = self._codecs.get(name)
        except CodecChoiceError as error:
            raise InvalidRequestError(str(error), param="codec") from None
        if codec.exact or not exact:
            return codec.name
        if not asked:
            return AUTO
        raise InvalidRequestError(
            f"codec {name!r} is lossy, but the request asks for exact KV; name an exact codec, or auto", param="codec"
        )

    def cache_space(self, codec: str) -> str:
        """Where pages of a request with this codec, or AUTO, are shared: a lossy codec's only among themselves."""
        return "" if codec == AUTO or self._codecs.get(codec).exact else codec

    async def measure_codecs(self) -> None:
        """Measure each codec of AUTO here, one after the other, beside the requests; then AUTO can choose."""
        for name in self._codecs.automatic:
            try:
                self.chooser.costs[name] = await self._codecs.measured(
                    name, self.parts.model.loaded, on_device=self.parts.transports.on_device
                )
            except CodecChoiceError as error:
                logger.warning("codec %s: skipping one codec: %s", AUTO, error)

    def fetch_s(self) -> float:
        """Seconds in which the KV of a token comes here, from the mean of all links; 0 if none was measured."""
        layout = self.parts.access.layout
        return layout.page_bytes / layout.page_size * self.chooser.mean_link_s()

    def learn(self, progress: Progress) -> None:
        """Measure a request that has come to its end."""
        if (share := progress.hidden_share()) is not None:
            self.parts.meters.transfers.hidden_share.observe(share)
        if (fetched := progress.fetched_s()) is not None:
            self.local.remote.note(len(progress.request.prompt_ids) - progress.cached_tokens, fetched)
        self.chooser.observe_steps(*progress.steps_after())
        self.chooser.observe_drafts(progress.drafts.proposed, progress.drafts.accepted)

    def offered_transports(self, address: str) -> Sequence[Transport]:
        """Those that are offered to a worker now: all but what is avoided, if there are others."""
        now, every = monotonic(), self.parts.transports.all
        return [each for each in every if self._avoided.get((address, each.name), 0.0) <= now] or every

    def avoid(self, address: str, transport: str) -> None:
        """Agreed upon with a worker, a transport brought nothing: perhaps no network leads there."""
        if len(self.parts.transports.all) > 1:
            self._avoided[address, transport] = monotonic() + AVOIDED_S

    def offer(self, name: str, address: str, raw_bytes: int, progress: Progress) -> list[Codec]:
        """What a prefill worker may take, best first: codec `name`, for AUTO what suits the missing KV and the link.

        Then those that serve while that one is not compiled there. While it is not compiled here, they come first.
        """
        codecs = self._codecs
        if name == AUTO:
            choice = self.chooser.choose(address, raw_bytes)
            name, progress.codec_reason = choice.codec, choice.sentence
        others = [self.chooser.meanwhile(address, raw_bytes, codecs.usable), WITHOUT_CODE]
        obstacle = codecs.ask_for(name)
        progress.asked_codec = name
        progress.substituted = f"codec {name} " + (
            f"{obstacle} on the decode worker" if obstacle else "is not compiled on the prefill worker yet"
        )
        return [codecs.get(each) for each in dict.fromkeys([*others, name] if obstacle else [name, *others])]
