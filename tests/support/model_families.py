"""Model families and what each of their parameters does: the ground truth of routing.

Written from the forward pass of each class, not from what routing says. Everything with two or
more dims that no pattern names is a hidden map from features to features, so Muon's; everything
with fewer is AdamW's. Classes of transformers are the real ones, with their own default widths, on
the meta device; those of other libraries are small mirrors with the same names, types and nesting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

CONV_ADVICE = "Jordan: all convolutions but the first"
LM_ADVICE = "Jordan, Moonlight, Muon in torch: embeddings and head to AdamW"
SSM_ADVICE = "Mamba: no decay on A and D; projections are matrices"
VIT_ADVICE = "timm, Beyer: no decay on tokens and positions; patch embedding and head to AdamW"
DIT_ADVICE = "as Jordan: input and output layers to AdamW"


@dataclass(frozen=True, eq=False)
class Family:
    """One class of models.

    Attributes:
        name: Library and class.
        kinds: By rule, patterns (as in `fnmatch`) of the parameters that are no hidden maps.
        advice: Who says so.
        make: Builds it; None for the class of that name in transformers.
        config: Settings of its config in transformers.
    """

    name: str
    kinds: Mapping[str, tuple[str, ...]]
    advice: str = LM_ADVICE
    make: Callable[[], nn.Module] | None = None
    config: Mapping[str, object] = ()

    @functools.cache  # noqa: B019 - families live as long as the tests
    def build(self) -> nn.Module:
        """Return the model on the meta device, without weights."""
        with torch.device("meta"):
            if self.make is not None:
                return self.make()
            import transformers

            cls = getattr(transformers, self.name.split(".")[-1])
            return cls(cls.config_class(**dict(self.config)))


def params(**shapes):
    """A module with these parameters of its own."""
    return add_params(nn.Module(), **shapes)


def add_params(module, **shapes):
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape)))
    return module


def tree(class_name="Mirror", /, **children):
    """A module of a class of that name with these children."""
    module = type(class_name, (nn.Module,), {})()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def linear(take, give):
    return nn.Linear(take, give)


def mlp(width, hidden=None):
    hidden = hidden or 4 * width
    return tree("Mlp", fc1=linear(width, hidden), fc2=linear(hidden, width))


def attention(width):
    return tree("Attention", qkv=linear(width, 3 * width), proj=linear(width, width))


def vit_block(width):
    return tree("Block", norm1=nn.LayerNorm(width), attn=attention(width), mlp=mlp(width))


def vit_blocks(width, depth=2):
    return nn.Sequential(*(vit_block(width) for _ in range(depth)))


def timm_vit():
    model = tree(
        "VisionTransformer",
        patch_embed=tree("PatchEmbed", proj=nn.Conv2d(3, 64, 16, 16)),
        blocks=vit_blocks(64),
        norm=nn.LayerNorm(64),
        head=linear(64, 10),
    )
    return add_params(model, cls_token=(1, 1, 64), reg_token=(1, 4, 64), pos_embed=(1, 201, 64))


def timm_naflexvit():
    embeds = tree("NaFlexEmbeds", proj=linear(768, 64))
    add_params(embeds, reg_token=(1, 4, 64), pos_embed=(1, 16, 16, 64))
    return tree("NaFlexVit", embeds=embeds, blocks=vit_blocks(64), head=linear(64, 10))


def timm_swin():
    def block():
        attn = attention(96)
        add_params(attn, relative_position_bias_table=(169, 3))
        return tree("SwinBlock", attn=attn, mlp=mlp(96))

    merging = tree("PatchMerging", norm=nn.LayerNorm(384), reduction=linear(384, 192))
    stages = nn.Sequential(tree("Stage", blocks=nn.Sequential(block(), block()), down=merging))
    head = tree("ClassifierHead", fc=linear(192, 10))
    embed = tree("PatchEmbed", proj=nn.Conv2d(3, 96, 4, 4), norm=nn.LayerNorm(96))
    return tree("SwinTransformer", patch_embed=embed, layers=stages, head=head)


class NoDecay(nn.Module):
    """Lists what is not decayed, as timm's models do."""

    def no_weight_decay(self):
        return {"offsets"}


def timm_levit():
    attn = tree("Attention", qkv=tree("LinearNorm", linear=linear(128, 256)))
    attn.add_module("proj", tree("LinearNorm", linear=linear(128, 128)))
    add_params(attn, attention_biases=(4, 196))
    marked = add_params(NoDecay(), offsets=(4, 196))
    stem = tree("Stem16", conv1=tree("ConvNorm", linear=nn.Conv2d(3, 32, 3)))
    stem.add_module("conv2", tree("ConvNorm", linear=nn.Conv2d(32, 128, 3)))
    block = tree("LevitBlock", attn=attn, marked=marked)
    head = tree("NormLinear", bn=nn.BatchNorm1d(128), linear=linear(128, 10))
    return tree("Levit", stem=stem, stages=nn.Sequential(nn.Sequential(block)), head=head)


def timm_efficientnet():
    def block(width):
        return tree(
            "InvertedResidual",
            conv_pw=nn.Conv2d(width, 6 * width, 1, bias=False),
            conv_dw=nn.Conv2d(6 * width, 6 * width, 3, groups=6 * width, bias=False),
            se=tree(
                "SqueezeExcite",
                conv_reduce=nn.Conv2d(6 * width, 4, 1),
                conv_expand=nn.Conv2d(4, 6 * width, 1),
            ),
            conv_pwl=nn.Conv2d(6 * width, width, 1, bias=False),
        )

    return tree(
        "EfficientNet",
        conv_stem=nn.Conv2d(3, 16, 3, bias=False),
        blocks=nn.Sequential(nn.Sequential(block(16), block(16))),
        conv_head=nn.Conv2d(16, 128, 1, bias=False),
        classifier=linear(128, 10),
    )


def torchvision_vgg():
    convs = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()]
    dense = [linear(32 * 49, 256), nn.ReLU(), nn.Dropout(), linear(256, 256), nn.ReLU()]
    features, classifier = nn.Sequential(*convs), nn.Sequential(*dense, linear(256, 10))
    return tree("VGG", features=features, classifier=classifier)


def torchvision_resnet():
    def block(take, give):
        return tree("BasicBlock", conv1=nn.Conv2d(take, give, 3), conv2=nn.Conv2d(give, give, 3))

    return tree(
        "ResNet",
        conv1=nn.Conv2d(3, 64, 7, bias=False),
        bn1=nn.BatchNorm2d(64),
        layer1=nn.Sequential(block(64, 64), block(64, 64)),
        layer2=nn.Sequential(block(64, 128), block(128, 128)),
        fc=linear(128, 10),
    )


def torchvision_maskrcnn():
    return tree(
        "MaskRCNN",
        backbone=tree("BackboneWithFPN", body=torchvision_resnet().eval()),
        roi_heads=tree(
            "RoIHeads",
            box_head=tree("TwoMLPHead", fc6=linear(3136, 64), fc7=linear(64, 64)),
            box_predictor=tree(
                "FastRCNNPredictor", cls_score=linear(64, 11), bbox_pred=linear(64, 44)
            ),
        ),
    )


def lenet():
    convs = {"conv1": nn.Conv2d(1, 6, 5), "conv2": nn.Conv2d(6, 16, 5)}
    dense = {"fc1": linear(256, 120), "fc2": linear(120, 84), "fc3": linear(84, 10)}
    return tree("Net", **convs, **dense)


def resnet_block(take, give):
    return tree(
        "ResnetBlock2D",
        norm1=nn.GroupNorm(4, take),
        conv1=nn.Conv2d(take, give, 3),
        time_emb_proj=linear(128, give),
        conv2=nn.Conv2d(give, give, 3),
    )


def diffusers_unet():
    attn = tree("Attention", to_q=linear(32, 32), to_k=linear(32, 32), to_v=linear(32, 32))
    attn.add_module("to_out", nn.ModuleList([linear(32, 32), nn.Dropout()]))
    block = tree("BasicTransformerBlock", attn1=attn)
    spatial = tree("Transformer2DModel", proj_in=nn.Conv2d(32, 32, 1))
    spatial.add_module("transformer_blocks", nn.ModuleList([block]))
    spatial.add_module("proj_out", nn.Conv2d(32, 32, 1))
    down = tree("CrossAttnDownBlock2D", attentions=nn.ModuleList([spatial]))
    down.add_module("resnets", nn.ModuleList([resnet_block(32, 32)]))
    return tree(
        "UNet2DConditionModel",
        conv_in=nn.Conv2d(4, 32, 3),
        time_embedding=tree(
            "TimestepEmbedding", linear_1=linear(32, 128), linear_2=linear(128, 128)
        ),
        down_blocks=nn.ModuleList([down]),
        up_blocks=nn.ModuleList([tree("UpBlock2D", resnets=nn.ModuleList([resnet_block(64, 32)]))]),
        conv_norm_out=nn.GroupNorm(4, 32),
        conv_out=nn.Conv2d(32, 4, 3),
    )


def diffusers_vae():
    def half(name, take, give):
        mid = tree("UNetMidBlock2D", resnets=nn.ModuleList([resnet_block(64, 64)]))
        conv_in, conv_out = nn.Conv2d(take, 64, 3), nn.Conv2d(64, give, 3)
        return tree(name, conv_in=conv_in, mid_block=mid, conv_out=conv_out)

    return tree("AutoencoderKL", encoder=half("Encoder", 3, 32), decoder=half("Decoder", 16, 3))


def timestep_embedder(width):
    return tree("TimestepEmbedding", linear_1=linear(256, width), linear_2=linear(width, width))


def diffusers_flux():
    width = 96
    attn = tree("FluxAttention", to_q=linear(width, width), to_k=linear(width, width))
    attn.add_module("to_out", nn.ModuleList([linear(width, width)]))
    norm = tree("AdaLayerNormZero", linear=linear(width, 6 * width))
    block = tree("FluxTransformerBlock", norm1=norm, attn=attn)
    embed = tree("CombinedTimestepTextProjEmbeddings", timestep_embedder=timestep_embedder(width))
    return tree(
        "FluxTransformer2DModel",
        time_text_embed=embed,
        context_embedder=linear(512, width),
        x_embedder=linear(64, width),
        transformer_blocks=nn.ModuleList([block]),
        norm_out=tree("AdaLayerNormContinuous", linear=linear(width, 2 * width)),
        proj_out=linear(width, 64),
    )


def diffusers_pixart():
    width = 96
    block = tree("BasicTransformerBlock", attn1=tree("Attention", to_q=linear(width, width)))
    add_params(block, scale_shift_table=(6, width))
    emb = tree(
        "PixArtAlphaCombinedTimestepSizeEmbeddings", timestep_embedder=timestep_embedder(width)
    )
    model = tree(
        "PixArtTransformer2DModel",
        pos_embed=tree("PatchEmbed", proj=nn.Conv2d(4, width, 2, 2)),
        transformer_blocks=nn.ModuleList([block]),
        proj_out=linear(width, 32),
        adaln_single=tree("AdaLayerNormSingle", emb=emb, linear=linear(width, 6 * width)),
        caption_projection=tree(
            "PixArtAlphaTextProjection", linear_1=linear(512, width), linear_2=linear(width, width)
        ),
    )
    return add_params(model, scale_shift_table=(2, width))


def diffusers_auraflow():
    embed = add_params(tree("AuraFlowPatchEmbed", proj=linear(16, 96)), pos_embed=(1, 1024, 96))
    block = tree("AuraFlowJointTransformerBlock", attn=tree("Attention", to_q=linear(96, 96)))
    model = tree(
        "AuraFlowTransformer2DModel",
        pos_embed=embed,
        context_embedder=linear(256, 96),
        joint_transformer_blocks=nn.ModuleList([block]),
        proj_out=linear(96, 16),
    )
    return add_params(model, register_tokens=(1, 8, 96))


class PygLinear(nn.Module):
    """As torch_geometric.nn.Linear: of a class of its own."""

    def __init__(self, take, give):
        super().__init__()
        add_params(self, weight=(give, take), bias=(give,))


def pyg_gat():
    def conv(take, give):
        lin = type("Linear", (PygLinear,), {})(take, give)
        return add_params(tree("GATConv", lin=lin), att_src=(1, 2, give // 2), att_dst=(1, 2, 8))

    return tree("GAT", convs=nn.ModuleList([conv(8, 16), conv(16, 16)]), head=linear(16, 5))


def pyg_rgcn():
    convs = [params(weight=(4, 8, 16), bias=(16,)), params(weight=(4, 16, 16), bias=(16,))]
    return tree("RGCN", node_emb=nn.Embedding(50, 8), convs=nn.ModuleList(convs), out=linear(16, 5))


def peft_lora():
    def adapted(take, give):
        base = linear(take, give).requires_grad_(False)
        lora = {"lora_A": nn.ModuleDict({"default": nn.Linear(take, 4, bias=False)})}
        lora["lora_B"] = nn.ModuleDict({"default": nn.Linear(4, give, bias=False)})
        embed = {name: nn.ParameterDict() for name in ("lora_embedding_A", "lora_embedding_B")}
        return tree("Linear", base_layer=base, **lora, **embed)

    embed = tree("Embedding", base_layer=nn.Embedding(99, 32).requires_grad_(False))
    for side, shape in (("A", (4, 99)), ("B", (32, 4))):
        embed.add_module(
            f"lora_embedding_{side}",
            nn.ParameterDict({"default": nn.Parameter(torch.empty(shape))}),
        )
    layer = tree("Layer", self_attn=tree("Attention", q_proj=adapted(32, 32)))
    saved = tree(
        "ModulesToSaveWrapper",
        original_module=linear(32, 5).requires_grad_(False),
        modules_to_save=nn.ModuleDict({"default": linear(32, 5)}),
    )
    model = tree("LlamaModel", embed_tokens=embed, layers=nn.ModuleList([layer]))
    whole = tree("LlamaForSequenceClassification", model=model, score=saved)
    return tree("PeftModel", base_model=tree("LoraModel", model=whole))


def lerobot_pi0():
    layer = tree("Layer", self_attn=tree("Attention", q_proj=linear(64, 64)), mlp=mlp(64))
    expert = tree("GemmaModel", layers=nn.ModuleList([layer, layer]))
    return tree(
        "PI0Policy",
        paligemma_with_expert=tree("PaliGemmaWithExpertModel", gemma_expert=expert),
        state_proj=linear(32, 64),
        action_in_proj=linear(32, 64),
        action_out_proj=linear(64, 32),
        action_time_mlp_in=linear(128, 64),
        action_time_mlp_out=linear(64, 64),
    )


def cleanrl_ppo():
    def net(give):
        return nn.Sequential(linear(8, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, give))

    return tree("Agent", critic=net(1), actor=net(8))


def torchtitan_llama():
    layer = tree(
        "TransformerBlock",
        attention=tree("Attention", wq=linear(64, 64), wo=linear(64, 64)),
        feed_forward=tree("FeedForward", w1=linear(64, 96), w2=linear(96, 64), w3=linear(64, 96)),
        attention_norm=nn.RMSNorm(64),
    )
    return tree(
        "Transformer",
        tok_embeddings=nn.Embedding(99, 64),
        layers=nn.ModuleDict({"0": layer}),
        norm=nn.RMSNorm(64),
        output=linear(64, 99),
    )


def torchtitan_moe():
    experts = params(w1=(4, 96, 64), w2=(4, 64, 96), w3=(4, 96, 64))
    moe = tree("MoE", experts=experts, router=tree("TokenChoiceTopKRouter", gate=linear(64, 4)))
    layers = nn.ModuleDict({"0": tree("TransformerBlock", moe=moe)})
    tok, output = nn.Embedding(99, 64), linear(64, 99)
    return tree("DeepSeekV3Model", tok_embeddings=tok, layers=layers, output=output)


def mamba_ssm():
    mixer = tree(
        "Mamba",
        in_proj=linear(64, 256),
        conv1d=nn.Conv1d(128, 128, 4, groups=128),
        x_proj=linear(128, 36),
        dt_proj=linear(4, 128),
        out_proj=linear(128, 64),
    )
    add_params(mixer, A_log=(128, 16), D=(128,), dynamics=(128, 16))
    mixer.dynamics._no_weight_decay = True
    layers = nn.ModuleList([tree("Block", mixer=mixer)])
    backbone = tree("MixerModel", embedding=nn.Embedding(99, 64), layers=layers)
    return tree("MambaLMHeadModel", backbone=backbone, lm_head=nn.Linear(64, 99, bias=False))


def encodec_vq():
    codebook = add_params(tree("EuclideanCodebook"), weight=(64, 32))
    layers = nn.ModuleList([tree("VectorQuantization", codebook=codebook)])
    quantizer = add_params(tree("ResidualVQ", layers=layers), codebooks=(4, 64, 32))
    encoder = tree("Encoder", conv_in=nn.Conv1d(1, 16, 7), conv_mid=nn.Conv1d(16, 32, 3))
    return tree("Codec", encoder=encoder, quantizer=quantizer)


def clip_openai():
    conv1 = nn.Conv2d(3, 64, 16, 16)
    visual = tree("VisionTransformer", conv1=conv1, transformer=tree(resblocks=vit_blocks(64)))
    add_params(visual, class_embedding=(64,), positional_embedding=(50, 64), proj=(64, 48))
    model = tree("CLIP", visual=visual, transformer=tree(resblocks=vit_blocks(40)))
    model.add_module("token_embedding", nn.Embedding(99, 40))
    return add_params(
        model, positional_embedding=(77, 40), text_projection=(40, 48), logit_scale=()
    )


BERT = {"embedding": ("*_embeddings.weight",)}
LLAMA = {"embedding": ("model.embed_tokens.weight",), "head": ("lm_head.weight",)}
PATCHES = "*.patch_embeddings.projection.weight"
HF_VIT = {"input": (PATCHES,), "table": ("*.position_embeddings", "*_token")}
TWO = {"num_hidden_layers": 2}

FAMILIES = (
    Family(
        "transformers.BertForPreTraining",
        {**BERT, "head": ("cls.seq_relationship.weight",)},
        config=TWO,
    ),
    Family(
        "transformers.BertForSequenceClassification",
        {**BERT, "head": ("classifier.weight",)},
        config=TWO,
    ),
    Family("transformers.RobertaForMaskedLM", BERT, config=TWO),
    Family(
        "transformers.RobertaForSequenceClassification",
        {**BERT, "head": ("classifier.out_proj.weight",)},
        config=TWO,
    ),
    Family(
        "transformers.DistilBertForSequenceClassification",
        {**BERT, "head": ("classifier.weight",)},
        config={"n_layers": 2},
    ),
    Family(
        "transformers.DistilBertForQuestionAnswering",
        {**BERT, "head": ("qa_outputs.weight",)},
        config={"n_layers": 2},
    ),
    Family("transformers.ElectraForMaskedLM", BERT, config=TWO),
    Family(
        "transformers.ElectraForPreTraining",
        {**BERT, "head": ("discriminator_predictions.dense_prediction.weight",)},
        config=TWO,
    ),
    Family("transformers.AlbertForMaskedLM", BERT, config=TWO),
    Family(
        "transformers.BartForSequenceClassification",
        {
            "embedding": ("model.shared.weight", "*.embed_positions.weight"),
            "head": ("classification_head.out_proj.weight",),
        },
        config={"encoder_layers": 1, "decoder_layers": 1},
    ),
    Family(
        "transformers.T5ForConditionalGeneration",
        {"embedding": ("shared.weight", "*.relative_attention_bias.weight")},
        config={"num_layers": 2},
    ),
    Family(
        "transformers.GPT2LMHeadModel",
        {"embedding": ("transformer.wte.weight", "transformer.wpe.weight")},
        config={"n_layer": 2},
    ),
    Family("transformers.LlamaForCausalLM", LLAMA, config=TWO),
    Family(
        "transformers.LlamaForSequenceClassification",
        {"embedding": ("model.embed_tokens.weight",), "head": ("score.weight",)},
        config=TWO,
    ),
    Family("transformers.Phi3ForCausalLM", LLAMA, config=TWO),
    Family(
        "transformers.GPTNeoXForCausalLM",
        {
            "embedding": ("gpt_neox.embed_in.weight",),
            "head": ("lm_head.weight", "embed_out.weight"),
        },
        config=TWO,
    ),
    Family("transformers.MixtralForCausalLM", LLAMA, config=TWO),
    Family("transformers.GptOssForCausalLM", {**LLAMA, "bias": ("*_bias",)}, config=TWO),
    Family(
        "transformers.MambaForCausalLM",
        {
            "embedding": ("backbone.embeddings.weight",),
            "table": ("*.A_log",),
            "depthwise conv": ("*.conv1d.weight",),
        },
        SSM_ADVICE,
        config=TWO,
    ),
    Family(
        "transformers.ModernBertForSequenceClassification",
        {"embedding": ("*.tok_embeddings.weight",), "head": ("classifier.weight",)},
        config=TWO,
    ),
    Family(
        "transformers.ViTForImageClassification",
        {**HF_VIT, "head": ("classifier.weight",)},
        VIT_ADVICE,
        config=TWO,
    ),
    Family(
        "transformers.YolosForObjectDetection",
        {
            "input": (PATCHES,),
            "table": ("*position_embeddings", "*_token", "*.detection_tokens"),
            "head": ("class_labels_classifier.layers.2.weight", "bbox_predictor.layers.2.weight"),
        },
        VIT_ADVICE,
        config=TWO,
    ),
    Family(
        "transformers.SegformerForSemanticSegmentation",
        {
            "input": (
                "segformer.*.0.patch_embeddings.proj.weight",
                "*.patch_embeddings.0.proj.weight",
            ),
            "head": ("decode_head.classifier.weight",),
            "depthwise conv": ("*.dwconv.dwconv.weight", "*.dwconv.weight"),
        },
        CONV_ADVICE,
    ),
    Family(
        "transformers.SwinForImageClassification",
        {
            "input": (PATCHES,),
            "bias": ("*.relative_position_bias_table",),
            "head": ("classifier.weight",),
        },
        VIT_ADVICE,
        config={"depths": [1, 1, 1, 1]},
    ),
    Family(
        "transformers.ConvNextForImageClassification",
        {
            "input": ("convnext.embeddings.patch_embeddings.weight",),
            "head": ("classifier.weight",),
            "depthwise conv": ("*.dwconv.weight",),
        },
        CONV_ADVICE,
        config={"depths": [1, 1, 1, 1]},
    ),
    Family(
        "transformers.ResNetForImageClassification",
        {
            "input": ("resnet.embedder.embedder.convolution.weight",),
            "head": ("classifier.1.weight",),
        },
        CONV_ADVICE,
        config={"depths": [1, 1, 1, 1]},
    ),
    Family(
        "transformers.MobileNetV2ForImageClassification",
        {
            "input": ("*.conv_stem.first_conv.convolution.weight",),
            "head": ("classifier.weight",),
            "depthwise conv": ("*.conv_3x3.convolution.weight",),
        },
        CONV_ADVICE,
    ),
    Family(
        "transformers.DPTForDepthEstimation",
        {**HF_VIT, "head": ("head.head.4.weight",)},
        VIT_ADVICE,
        config={"num_hidden_layers": 12},
    ),
    Family(
        "transformers.CLIPModel",
        {
            "embedding": ("*.token_embedding.weight", "*.position_embedding.weight"),
            "input": ("vision_model.embeddings.patch_embedding.weight",),
        },
    ),
    Family(
        "transformers.WhisperForConditionalGeneration",
        {
            "embedding": ("*.embed_tokens.weight", "*.embed_positions.weight"),
            "input": ("model.encoder.conv1.weight",),
        },
        config={"encoder_layers": 1, "decoder_layers": 1},
    ),
    Family(
        "transformers.Wav2Vec2ForPreTraining",
        {
            "input": ("wav2vec2.feature_extractor.conv_layers.0.conv.weight",),
            "table": ("quantizer.codevectors",),
            "vector": ("*.pos_conv_embed.conv.parametrizations.weight.original0",),
        },
        config=TWO,
    ),
    Family(
        "transformers.Wav2Vec2ForCTC",
        {
            "input": ("wav2vec2.feature_extractor.conv_layers.0.conv.weight",),
            "vector": ("*.pos_conv_embed.conv.parametrizations.weight.original0",),
            "head": ("lm_head.weight",),
        },
        config={**TWO, "vocab_size": 32},
    ),
    Family(
        "transformers.DecisionTransformerModel",
        {
            "embedding": ("encoder.wpe.weight", "encoder.wte.weight", "embed_timestep.weight"),
            "input": ("embed_state.weight", "embed_action.weight"),
            "vector": ("embed_return.weight",),
            "head": ("predict_*.weight",),
        },
        config={"n_layer": 2},
    ),
    Family(
        "transformers.PerceiverForMaskedLM",
        {
            "embedding": ("*.input_preprocessor.*embeddings.weight",),
            "table": ("*.embeddings.latents", "*.output_position_encodings.position_embeddings"),
        },
        config={"num_self_attends_per_block": 2},
    ),
    Family(
        "transformers.PatchTSTForPrediction",
        {
            "vector": ("model.encoder.embedder.input_embedding.weight",),
            "head": ("head.projection.weight",),
        },
        config=TWO,
    ),
    Family(
        "timm.VisionTransformer",
        {
            "input": ("patch_embed.proj.weight",),
            "head": ("head.weight",),
            "table": ("pos_embed", "reg_token", "cls_token"),
        },
        VIT_ADVICE,
        timm_vit,
    ),
    Family(
        "timm.NaFlexVit",
        {
            "input": ("embeds.proj.weight",),
            "head": ("head.weight",),
            "table": ("embeds.pos_embed", "embeds.reg_token"),
        },
        VIT_ADVICE,
        timm_naflexvit,
    ),
    Family(
        "timm.SwinTransformer",
        {
            "input": ("patch_embed.proj.weight",),
            "head": ("head.fc.weight",),
            "bias": ("*.relative_position_bias_table",),
        },
        VIT_ADVICE,
        timm_swin,
    ),
    Family(
        "timm.Levit",
        {
            "input": ("stem.conv1.linear.weight",),
            "head": ("head.linear.weight",),
            "table": ("*.attention_biases", "*.offsets"),
        },
        VIT_ADVICE,
        timm_levit,
    ),
    Family(
        "timm.EfficientNet",
        {
            "input": ("conv_stem.weight",),
            "head": ("classifier.weight",),
            "depthwise conv": ("*.conv_dw.weight",),
        },
        CONV_ADVICE,
        timm_efficientnet,
    ),
    Family(
        "torchvision.VGG",
        {"input": ("features.0.weight",), "head": ("classifier.5.weight",)},
        CONV_ADVICE,
        torchvision_vgg,
    ),
    Family(
        "torchvision.ResNet",
        {"input": ("conv1.weight",), "head": ("fc.weight",)},
        CONV_ADVICE,
        torchvision_resnet,
    ),
    Family(
        "torchvision.MaskRCNN",
        {
            "input": ("backbone.body.conv1.weight",),
            "head": (
                "backbone.body.fc.weight",
                "roi_heads.box_predictor.cls_score.weight",
                "roi_heads.box_predictor.bbox_pred.weight",
            ),
        },
        CONV_ADVICE,
        torchvision_maskrcnn,
    ),
    Family("LeNet", {"input": ("conv1.weight",), "head": ("fc3.weight",)}, CONV_ADVICE, lenet),
    Family(
        "diffusers.UNet2DConditionModel",
        {"input": ("conv_in.weight",), "head": ("conv_out.weight",)},
        CONV_ADVICE,
        diffusers_unet,
    ),
    Family(
        "diffusers.AutoencoderKL",
        {
            "input": ("encoder.conv_in.weight", "decoder.conv_in.weight"),
            "head": ("encoder.conv_out.weight", "decoder.conv_out.weight"),
        },
        CONV_ADVICE,
        diffusers_vae,
    ),
    Family(
        "diffusers.FluxTransformer2DModel",
        {"input": ("x_embedder.weight", "context_embedder.weight"), "head": ("proj_out.weight",)},
        DIT_ADVICE,
        diffusers_flux,
    ),
    Family(
        "diffusers.PixArtTransformer2DModel",
        {
            "input": ("pos_embed.proj.weight",),
            "head": ("proj_out.weight",),
            "table": ("*scale_shift_table",),
        },
        DIT_ADVICE,
        diffusers_pixart,
    ),
    Family(
        "diffusers.AuraFlowTransformer2DModel",
        {
            "input": ("pos_embed.proj.weight", "context_embedder.weight"),
            "head": ("proj_out.weight",),
            "table": ("pos_embed.pos_embed", "register_tokens"),
        },
        DIT_ADVICE,
        diffusers_auraflow,
    ),
    Family(
        "torch_geometric.GAT",
        {"table": ("*.att_src", "*.att_dst"), "head": ("head.weight",)},
        LM_ADVICE,
        pyg_gat,
    ),
    Family(
        "torch_geometric.RGCN",
        {"embedding": ("node_emb.weight",), "head": ("out.weight",)},
        LM_ADVICE,
        pyg_rgcn,
    ),
    Family(
        "peft.LoraModel",
        {
            "embedding": ("*.lora_embedding_?.default",),
            "head": ("*.score.modules_to_save.default.weight",),
        },
        LM_ADVICE,
        peft_lora,
    ),
    Family(
        "lerobot.PI0Policy",
        {
            "input": ("state_proj.weight", "action_in_proj.weight"),
            "head": ("action_out_proj.weight",),
        },
        DIT_ADVICE,
        lerobot_pi0,
    ),
    Family(
        "cleanrl.Agent", {"head": ("actor.4.weight", "critic.4.weight")}, LM_ADVICE, cleanrl_ppo
    ),
    Family(
        "torchtitan.Llama",
        {"embedding": ("tok_embeddings.weight",), "head": ("output.weight",)},
        LM_ADVICE,
        torchtitan_llama,
    ),
    Family(
        "torchtitan.DeepSeekV3Model",
        {"embedding": ("tok_embeddings.weight",), "head": ("output.weight",)},
        LM_ADVICE,
        torchtitan_moe,
    ),
    Family(
        "mamba_ssm.MambaLMHeadModel",
        {
            "embedding": ("backbone.embedding.weight",),
            "head": ("lm_head.weight",),
            "table": ("*.A_log", "*.dynamics"),
            "depthwise conv": ("*.conv1d.weight",),
        },
        SSM_ADVICE,
        mamba_ssm,
    ),
    Family(
        "encodec.Codec",
        {"input": ("encoder.conv_in.weight",), "table": ("*.codebook.weight", "*.codebooks")},
        CONV_ADVICE,
        encodec_vq,
    ),
    Family(
        "open_clip.CLIP",
        {
            "input": ("visual.conv1.weight",),
            "embedding": ("token_embedding.weight",),
            "table": ("*positional_embedding",),
        },
        LM_ADVICE,
        clip_openai,
    ),
)
