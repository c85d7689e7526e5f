from common import FIXTURES, answers_of, right

half = answers_of(FIXTURES / "glm4-approx-plain" / "checkpoint", "float16")
whole = right("glm4-approx-plain")
print(f"float16 against float32: answers differ by up to {(half - whole).abs().max():.1f} nats")
