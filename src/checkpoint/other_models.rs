//! Models that are not implemented: what they are, and what to use instead.

/// Where the name of a model is from, which decides the program that runs it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameOf {
    /// `general.architecture`.
    Gguf,
    /// `model_type`.
    ConfigJson,
}

/// What can be used instead of any other model.
pub(crate) const SUPPORTED: &str = "use a Gemma 4, Qwen3.5 or Qwen3.6 checkpoint";

/// Models that generate no text, by name or the beginning of the name, in GGUF files or config.json.
const WITHOUT_TEXT: [(&[&str], &str); 4] = [
    (EMBEDDING, "an embedding model's, which generates no text"),
    (DIFFUSION, "an image or video diffusion model's, which generates no text"),
    (&["whisper", "wav2vec2", "wavtokenizer", "qwen3_asr"], "a speech model's, which generates no text"),
    (&["clip", "siglip"], "an image and text encoder's, which generates no text"),
];

#[rustfmt::skip]
const EMBEDDING: &[&str] = &[
    "gemma-embedding", "gemma_embedding", "llama-embed", "qwen3_vl_embedding", "bert", "nomic-bert", "nomic_bert", "jina-bert",
    "modern-bert", "modernbert", "neo-bert", "eurobert", "roberta", "xlm-roberta", "distilbert", "mpnet",
];

#[rustfmt::skip]
const DIFFUSION: &[&str] = &[
    "flux", "sd1", "sd3", "sdxl", "stable-diffusion", "qwen_image", "wan", "ltxv", "hyvid", "hidream", "lumina2", "aura",
    "cosmos", "chroma", "z_image", "pig",
];

/// Drafters of other models.
const DRAFTERS: [&str; 4] = ["eagle", "dflash", "medusa", "mlp_speculator"];

/// Names of models that are mistaken for a supported one.
const NAMES: [(&str, &str); 17] = [
    ("gemma3n", "Gemma 3n"),
    ("gemma3", "Gemma 3"),
    ("gemma2", "Gemma 2"),
    ("paligemma", "PaliGemma"),
    ("t5gemma", "T5Gemma"),
    ("recurrent_gemma", "RecurrentGemma"),
    ("recurrentgemma", "RecurrentGemma"),
    ("diffusion-gemma", "DiffusionGemma"),
    ("diffusion_gemma", "DiffusionGemma"),
    ("llama4", "Llama 4"),
    ("llama", "Llama, or a model like it"),
    ("mistral", "Mistral"),
    ("mixtral", "Mixtral"),
    ("phi", "Phi"),
    ("deepseek", "DeepSeek"),
    ("gpt-oss", "GPT-OSS"),
    ("gpt_oss", "GPT-OSS"),
];

/// The problem with another model's name, and the remedy.
pub(crate) fn other_model(name: &str, of: NameOf) -> String {
    if let Some(what) = without_text(name) {
        return format!("{} is {what}; {SUPPORTED}", shown(name));
    }
    let own = if name == "gemma" { Some("Gemma 1") } else { None };
    let own = own.or_else(|| NAMES.iter().find(|(start, _)| name.starts_with(start)).map(|(_, own)| *own));
    not_implemented(name, own.unwrap_or("another architecture"), of)
}

/// The problem with a text model that is called `own`, and the remedy.
pub(crate) fn not_implemented(name: &str, own: &str, of: NameOf) -> String {
    let program = match of {
        NameOf::Gguf => "llama.cpp",
        NameOf::ConfigJson => "transformers",
    };
    format!("{} is {own}, which is not implemented; {SUPPORTED}, or run this one with {program}", shown(name))
}

/// What a model that generates no text is.
pub(crate) fn without_text(name: &str) -> Option<&'static str> {
    let begins = |start: &&str| name.strip_prefix(start).is_some_and(|rest| !rest.starts_with(char::is_alphabetic));
    if DRAFTERS.iter().any(|start| name.starts_with(start)) {
        return Some("another model's drafter, which generates no text alone");
    }
    WITHOUT_TEXT.iter().find(|(names, _)| names.iter().any(begins)).map(|(_, what)| *what)
}

/// The name, quoted and shortened.
fn shown(name: &str) -> String {
    format!("{:?}", name.chars().take(60).collect::<String>())
}
