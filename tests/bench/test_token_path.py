"""`benchmarks.token_path`: its stub worker is one that the router takes."""

from benchmarks import token_path


def test_each_stream_brings_its_tokens(monkeypatch):
    monkeypatch.setattr(token_path, "TOKENS", {2: 40})
    figures = token_path.run([2], 1, 0.0, 0.0)
    assert [(figure.server, figure.streams) for figure in figures] == [("router", 2), ("bare proxy", 2)]
    assert all(figure.tokens_per_s > 0 for figure in figures)
    assert "| bare proxy | 2 |" in token_path.table(figures)
