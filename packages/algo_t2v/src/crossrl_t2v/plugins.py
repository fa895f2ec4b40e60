"""The plug-ins of this package, described; nothing heavy is imported.

Not in the package itself, where a submodule of the same name would replace a description once it is imported.
"""

from crossrl.protocols import Plugin

dance_grpo = Plugin(
    name="dance_grpo",
    summary="DanceGRPO (arXiv 2505.07818): clipped policy gradient over an SDE sampler",
    target="crossrl_t2v.dance_grpo:DanceGRPO",
)
diffusion_nft = Plugin(
    name="diffusion_nft",
    summary="DiffusionNFT (arXiv 2509.16117): forward-process policy optimisation, any sampler, no likelihood",
    target="crossrl_t2v.diffusion_nft:DiffusionNFT",
)
flow_matching = Plugin(
    name="flow_matching",
    summary="flow matching: supervised training on captioned videos, the algorithm of `crossrl sft`",
    target="crossrl_t2v.flow_matching:FlowMatching",
)
wan = Plugin(
    name="wan",
    summary="Wan 2.1 / 2.2 text-to-video: UMT5 text encoder, causal video VAE",
    target="crossrl_t2v.models.wan:WanFamily",
    requires=("diffusers>=0.38", "transformers>=5.5.3,<5.11"),
)
toy_reward = Plugin(
    name="toy",
    summary="closed-form reward of the toy world: colour, direction, smoothness, presence",
    target="crossrl_t2v.toy.rewards:ToyReward",
)
toy_data = Plugin(
    name="toy",
    summary="prompts and captioned clips of the toy world: colour x shape x direction",
    target="crossrl_t2v.toy.world:TOY",
)
