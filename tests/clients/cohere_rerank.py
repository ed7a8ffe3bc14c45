"""Documents reranked by Cohere's client, by embeddings and by a cross-encoder.

Run by the environment that the client is in, with the system's address and a folder for
``ok.json``, the number of right answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cohere
from cohere.errors import BadRequestError

_DOCUMENTS = ["A mill by the river.", "What is the time to the first token?", "Bread."]


def main(url: str, folder: Path) -> None:
    client = cohere.ClientV2(api_key="none", base_url=url)
    num_ok = 0

    query = _DOCUMENTS[1]
    answer = client.rerank(model="demo", query=query, documents=_DOCUMENTS)
    assert answer.results[0].index == 1, answer
    scores = [one.relevance_score for one in answer.results]
    assert scores == sorted(scores, reverse=True), answer
    assert abs(scores[0] - 1) < 1e-3, answer
    num_ok += 1

    best = client.rerank(model="demo", query=query, documents=_DOCUMENTS, top_n=1)
    assert [one.index for one in best.results] == [1], best
    num_ok += 1

    # As langchain-cohere always asks.
    cut = client.rerank(
        model="demo", query=query, documents=_DOCUMENTS, top_n=3, max_tokens_per_doc=4_000
    )
    assert [one.index for one in cut.results] == [one.index for one in answer.results], cut
    num_ok += 1

    answer = client.rerank(model="ranker", query=query, documents=_DOCUMENTS)
    scores = [one.relevance_score for one in answer.results]
    assert 0 < scores[2] < scores[1] < scores[0] < 1, answer
    num_ok += 1

    try:
        client.rerank(model="demo", query=query, documents=[])
    except BadRequestError as error:
        num_ok += error.body["error"]["param"] == "documents"
    (folder / "ok.json").write_text(json.dumps(num_ok), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
