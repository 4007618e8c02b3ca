"""Sends requests to a running `gemmule serve` with common client libraries. tests/serving/clients.rs starts the server,
and runs this.

usage: clients.py URL KEY EMBEDDER WRITER RANKER
"""

import sys

import numpy as np
import openai
from cohere import Client, ClientV2
from cohere.errors import NotFoundError
from huggingface_hub import InferenceClient
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

URL, KEY, EMBEDDER, WRITER, RANKER = sys.argv[1:]
TEXTS = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]
PROMPT = "One cold morning Ben walked to the f"


def close(a, b, tolerance=1e-6):
    difference = float(np.abs(np.array(a) - np.array(b)).max())
    assert difference <= tolerance, f"they differ by {difference}"


def raises(error, ask):
    try:
        ask()
    except error as raised:
        return raised
    raise AssertionError(f"expected {error.__name__}")


def official():
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    # By default, the client requests base64.
    coded = client.embeddings.create(model=EMBEDDER, input=TEXTS)
    plain = client.embeddings.create(model=EMBEDDER, input=TEXTS, encoding_format="float")
    vectors = np.array([item.embedding for item in plain.data])
    close([item.embedding for item in coded.data], vectors)
    close(np.linalg.norm(vectors, axis=1), 1.0, 1e-5)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far, (near, far)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > len(TEXTS)
    assert [item.index for item in plain.data] == [0, 1, 2]
    short = client.embeddings.create(model=EMBEDDER, input=TEXTS[0], dimensions=8)
    assert len(short.data[0].embedding) == 8

    assert {model.id for model in client.models.list()} == {EMBEDDER, WRITER, RANKER}
    assert client.models.retrieve(WRITER).id == WRITER

    asked = dict(model=WRITER, prompt=PROMPT, max_tokens=12, temperature=0)
    whole = client.completions.create(**asked, logprobs=2, n=2)
    text = whole.choices[0].text
    assert text.startswith("orest"), text
    assert "".join(whole.choices[0].logprobs.tokens) == text == whole.choices[1].text
    assert whole.usage.completion_tokens == 24
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == text
    assert parts[-1].usage.completion_tokens == 12

    messages = [{"role": "user", "content": PROMPT}]
    asked = dict(model=WRITER, messages=messages, max_tokens=8, temperature=0)
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    content = answer.choices[0].message.content
    assert "".join(token.token for token in answer.choices[0].logprobs.content) == content
    assert all(len(token.top_logprobs) == 2 for token in answer.choices[0].logprobs.content)
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == content
    assert parts[-1].choices[0].finish_reason == "length"

    # Fields that do not affect the text, and fields of other servers with neutral values.
    marks = dict(user="me", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="x", prompt_cache_key="y")
    off = dict(top_k=-1, repetition_penalty=1.0, min_p=0, guided_json=None, mirostat=0)
    same = client.chat.completions.create(**asked, **marks, response_format={"type": "text"}, extra_body=off)
    assert same.choices[0].message.content == content
    error = raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(**asked, response_format={"type": "json_object"}),
    )
    assert error.param == "response_format", error

    error = raises(openai.NotFoundError, lambda: client.embeddings.create(model="none", input="x"))
    assert error.code == "model_not_found", error
    error = raises(openai.BadRequestError, lambda: client.embeddings.create(model=EMBEDDER, input=""))
    assert error.param == "input", error
    other = openai.OpenAI(base_url=f"{URL}/v1", api_key="other", max_retries=0)
    raises(openai.AuthenticationError, lambda: other.embeddings.create(model=EMBEDDER, input="x"))
    return vectors, text, content


def hugging_face(vectors, content):
    client = InferenceClient(token=KEY)
    rows = client.feature_extraction(TEXTS, model=f"{URL}/embed", normalize=True)
    close(rows, vectors)
    one = client.feature_extraction(TEXTS[0], model=f"{URL}/embed", truncate=True)
    close(one[0], vectors[0])
    scores = client.sentence_similarity(TEXTS[0], TEXTS[1:], model=f"{URL}/similarity")
    close(scores, vectors[1:] @ vectors[0], 1e-5)
    # The base address forwards to the route that fits the model and the body.
    rows = client.feature_extraction(TEXTS, model=URL, normalize=True, truncate=True, truncation_direction="left")
    close(rows, vectors)
    scores = client.sentence_similarity(TEXTS[0], TEXTS[1:], model=URL)
    close(scores, vectors[1:] @ vectors[0], 1e-5)
    client = InferenceClient(base_url=URL, api_key=KEY)
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat_completion(messages, model=WRITER, max_tokens=8, temperature=0.0)
    assert answer.choices[0].message.content == content
    parts = client.chat_completion(messages, model=WRITER, max_tokens=8, temperature=0.0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == content


def langchain(vectors, text, content):
    asked = dict(base_url=f"{URL}/v1", api_key=KEY)
    # Without check_embedding_ctx_length=False, the client sends ids of OpenAI's tokenizer, which the server refuses.
    embedder = OpenAIEmbeddings(model=EMBEDDER, check_embedding_ctx_length=False, **asked)
    close(embedder.embed_documents(TEXTS), vectors)
    close(embedder.embed_query(TEXTS[2]), vectors[2])
    asked["temperature"] = 0
    assert OpenAI(model=WRITER, max_tokens=12, **asked).invoke(PROMPT) == text
    chat = ChatOpenAI(model=WRITER, max_tokens=8, **asked)
    assert chat.invoke(PROMPT).content == content
    assert "".join(part.content for part in chat.stream(PROMPT)) == content


def cohere():
    documents = ["rain", "a high tower", "a small bird"]
    second = ClientV2(api_key=KEY, base_url=URL)
    ranks = second.rerank(model=RANKER, query="tower", documents=documents, top_n=2)
    scores = [rank.relevance_score for rank in ranks.results]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True), scores
    first = Client(api_key=KEY, base_url=URL)
    old = first.rerank(model=RANKER, query="tower", documents=documents, return_documents=True)
    assert [rank.index for rank in old.results][:2] == [rank.index for rank in ranks.results]
    assert old.results[0].document.text == documents[old.results[0].index]
    error = raises(NotFoundError, lambda: second.rerank(model="none", query="x", documents=["x"]))
    assert "there is no model `none`" in error.body["message"], error


vectors, text, content = official()
hugging_face(vectors, content)
langchain(vectors, text, content)
cohere()
print("openai, huggingface_hub, langchain-openai and cohere: as expected")
