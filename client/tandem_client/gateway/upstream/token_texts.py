"""The texts of single tokens, which logprobs show. The service is asked once for each token."""

from collections.abc import Iterable

from tandem.v1 import inference_pb2

from tandem_client.credentials import Metadata
from tandem_client.gateway.errors import HttpError
from tandem_client.gateway.upstream.service import Service

# Of one call. The service takes as many as its model is long.
_MAX_IDS = 512


class TokenTexts:
    """The texts by id, of one model at a time. There are at most as many as the model's vocabulary has tokens."""

    def __init__(self, service: Service) -> None:
        self.by_id: dict[int, str] = {}
        self._service = service
        self._model = ""

    async def load(self, token_ids: Iterable[int], model: str, metadata: Metadata) -> None:
        """Makes sure that the texts of these ids are known. Raises HttpError."""
        if model != self._model:
            self.by_id.clear()
            self._model = model
        missing = list({token_id for token_id in token_ids if token_id not in self.by_id})
        for start in range(0, len(missing), _MAX_IDS):
            ids = missing[start : start + _MAX_IDS]
            request = inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False, separately=True)
            try:
                texts = (await self._service.detokenize(request, metadata)).texts
            except HttpError as error:
                # A model without a tokenizer. vLLM writes ids without a text so.
                if error.status != 400:
                    raise
                texts = [f"token_id:{token_id}" for token_id in ids]
            self.by_id.update(zip(ids, texts, strict=True))
