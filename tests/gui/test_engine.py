"""verl's FSDP2 engine with the tiled head against transformers' own logits, on the same weights and images."""

import tempfile

import pytest
import torch
from PIL import Image, ImageDraw

from crossrl_gui_agent.generate import banned_ids
from crossrl_gui_agent.patches import multiply_patches
from crossrl_gui_agent.sft import processor_prompter

CLICK = "<tool_call>\nclick 500</tool_call><|im_end|>"
ANSWERS = (CLICK, "no<|im_end|>", CLICK)


@pytest.fixture(scope="module")
def process_group():
    """One rank; gone again after these tests, unless it was there before."""
    if torch.distributed.is_initialized():
        yield
        return
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def rows(processor, answers):
    """(prompt ids, answer ids, image) of each sample."""
    prompter = processor_prompter(processor, 1000)
    found = []
    for i, answer in enumerate(answers):
        screen = Image.new("RGB", (160, 224), "white")
        ImageDraw.Draw(screen).rectangle((20 * i, 40, 20 * i + 60, 90), fill=(90, 120 * (i % 2), 200))
        prompt = prompter("Click.", [], screen, 1, "")
        found.append((prompt.ids, processor.tokenizer(answer)["input_ids"], screen))
    return found


def positions(model, processor, ids, pixels):
    """[4, L]: of the text, and M-RoPE's three."""
    kinds = (ids == processor.image_token_id).long()
    vision, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=pixels["image_grid_thw"])
    return torch.cat([torch.arange(ids.shape[1])[None], vision.reshape(3, -1)])


def reference(model, processor, samples, temperature):
    """log-prob and entropy of each answer's tokens from the logits, one sample at a time."""
    banned = torch.tensor(banned_ids(processor.tokenizer))
    found = []
    for prompt, answer, screen in samples:
        ids = torch.tensor([[*prompt, *answer]])
        pixels = processor.image_processor(images=[screen], return_tensors="pt")
        places = positions(model, processor, ids, pixels)[:, None]  # named: verl replaces the forward that counts them
        logits = model(input_ids=ids, position_ids=places, **pixels).logits[0, len(prompt) - 1 : -1] / temperature
        log_p = logits.index_fill(1, banned, -1e30).log_softmax(-1)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(1)
        found.append((log_p.gather(1, torch.tensor(answer)[:, None]).squeeze(1), entropy))
    return found


def batch(model, processor, samples, temperature, packed=False):
    """The samples as verl's workers get them."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    nested, answers, places, images = [], [], [], []
    for prompt, answer, screen in samples:
        ids = torch.tensor([*prompt, *answer])
        pixels = dict(processor.image_processor(images=[screen], return_tensors="pt"))
        nested.append(ids)
        answers.append(torch.tensor(answer))
        places.append(positions(model, processor, ids[None], pixels))
        images.append(pixels)

    def jagged(tensors):
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    masks = [torch.ones_like(answer) for answer in answers]
    fields = {"input_ids": jagged(nested), "position_ids": jagged(places), "responses": jagged(answers)}
    fields |= {"loss_mask": jagged(masks), "temperature": torch.full((len(samples),), temperature)}
    fields["multi_modal_inputs"] = NonTensorStack(*(NonTensorData(pixels) for pixels in images))
    data = TensorDict(fields, batch_size=len(samples))
    options = {"use_remove_padding": packed, "use_dynamic_bsz": True, "max_token_len_per_gpu": 4096}
    for name, value in (options | {"calculate_entropy": True}).items():
        data[name] = NonTensorData(value)
    return data


@pytest.fixture(scope="module")
def engine(tiny_folder, process_group):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    from crossrl_gui_agent.verl.engine import CpuFsdp2

    model = HFModelConfig(
        path=str(tiny_folder),
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
        fused_kernel_options={"max_head_bytes": 4 << 20},
    )
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=fp32)
    made = CpuFsdp2(model, config, FSDPOptimizerConfig(lr=1e-3), CheckpointConfig())
    made.initialize()
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("answers", [ANSWERS, ANSWERS[::2]], ids=["ragged", "equal lengths"])
def test_it_says_what_the_logits_say(engine, tiny_folder, processor, answers, temperature):
    from transformers import AutoModelForImageTextToText

    from crossrl_gui_agent.verl.worker import with_whole_positions

    model = AutoModelForImageTextToText.from_pretrained(tiny_folder, dtype=torch.float32)
    samples = rows(processor, answers)
    expected = reference(model, processor, samples, temperature)
    with engine.eval_mode():
        output = engine.infer_batch(with_whole_positions(batch(model, processor, samples, temperature)))
    found = output["model_output"]
    for i, ((prompt, answer, _), (log_p, entropy)) in enumerate(zip(samples, expected, strict=True)):
        place = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        assert torch.allclose(found["log_probs"].unbind()[i][place], log_p, atol=2e-5)
        assert torch.allclose(found["entropy"].unbind()[i][place], entropy, atol=2e-5)
        assert not found["log_probs"].unbind()[i][: len(prompt) - 1].any()


def test_its_gradient_is_that_of_the_logits(engine, tiny_folder, processor):
    from transformers import AutoModelForImageTextToText

    from crossrl_gui_agent.verl.worker import with_whole_positions

    model = AutoModelForImageTextToText.from_pretrained(tiny_folder, dtype=torch.float32)
    samples = rows(processor, ANSWERS)
    (-sum(lp.sum() + 0.1 * en.sum() for lp, en in reference(model, processor, samples, 1.0))).backward()

    def loss(model_output, data, dp_group):
        return -(model_output["log_probs"].values().sum() + 0.1 * model_output["entropy"].values().sum()), {}

    with engine.train_mode():
        engine.optimizer_zero_grad()
        data = with_whole_positions(batch(model, processor, samples, 1.0))
        engine.forward_backward_batch(data, loss)
        found = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters()}
        engine.optimizer_zero_grad()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert torch.allclose(found[name], parameter.grad, atol=1e-4 * scale, rtol=1e-3), name


def test_patches_are_multiplied_as_they_were_convolved(tiny_folder):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_folder, dtype=torch.float32)
    embed = model.model.visual.patch_embed
    pixels = torch.randn(12, 3 * 2 * 16 * 16)
    expected = embed(pixels)
    multiply_patches(model)
    assert torch.allclose(embed(pixels), expected, atol=1e-4)
    assert embed.proj.weight.dim() == 5  # as it is saved
