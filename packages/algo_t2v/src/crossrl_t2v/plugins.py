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
flow_grpo = Plugin(
    name="flow_grpo",
    summary="Flow-GRPO (arXiv 2505.05470): Flow-SDE sampler, KL to the base model; fast variant with windows",
    target="crossrl_t2v.flow_grpo:FlowGRPO",
)
flow_cps = Plugin(
    name="flow_cps",
    summary="Flow-CPS (arXiv 2509.05952): Flow-GRPO on a sampler that leaves no noise behind",
    target="crossrl_t2v.flow_cps:FlowCPS",
)
mix_grpo = Plugin(
    name="mix_grpo",
    summary="MixGRPO (arXiv 2507.21802): noise and training in a window that moves over the steps",
    target="crossrl_t2v.mix_grpo:MixGRPO",
)
grpo_guard = Plugin(
    name="grpo_guard",
    summary="GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a centred ratio that is alike at every step",
    target="crossrl_t2v.grpo_guard:GRPOGuard",
)
flow_dppo = Plugin(
    name="flow_dppo",
    summary="Flow-DPPO (arXiv 2606.11025): Flow-GRPO with a divergence trust region instead of a clip",
    target="crossrl_t2v.flow_dppo:FlowDPPO",
)
temp_flow = Plugin(
    name="temp_flow",
    summary="TempFlow-GRPO (arXiv 2508.04324): one branching step earns the reward, weighed by its noise",
    target="crossrl_t2v.temp_flow:TempFlow",
)
awm = Plugin(
    name="awm",
    summary="AWM (arXiv 2509.25050): policy gradient with the flow-matching loss as likelihood, any sampler",
    target="crossrl_t2v.awm:AWM",
)
dpo = Plugin(
    name="dpo",
    summary="online Diffusion-DPO (arXiv 2311.12908): prefers the best sample of a prompt over the worst",
    target="crossrl_t2v.dpo:DPO",
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
