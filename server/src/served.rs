//! What requests are read against: the model, its limits and its defaults, without a thread or a queue.

use foretoken::Engine;
use foretoken::chat::ChatTemplate;
use hyper::StatusCode;

use crate::api_error::ApiError;
use crate::defaults::GenerateDefaults;
use crate::fields::Fields;

pub(crate) struct Served {
    pub engine: Engine,
    /// The model's name in requests and answers.
    pub model: String,
    /// Maximum tokens of a sequence.
    pub context: usize,
    pub parallel: usize,
    /// Maximum number of running and waiting choices.
    pub places: usize,
    pub defaults: GenerateDefaults,
    /// Overrides the checkpoint's.
    pub chat_template: Option<ChatTemplate>,
}

impl Served {
    /// The template of chats.
    ///
    /// # Errors
    /// If there is none, or it does not compile.
    pub fn template(&self) -> foretoken::Result<&ChatTemplate> {
        self.chat_template.as_ref().map_or_else(|| self.engine.chat_template(), Ok)
    }

    /// # Errors
    /// If a request with `choices` choices of all prompts can never be admitted.
    pub fn check_places(&self, fields: &Fields, choices: usize) -> Result<(), ApiError> {
        let limit = self.places;
        if choices <= limit {
            return Ok(());
        }
        let problem =
            format!("needs {choices} places, but the queue has {limit}; send fewer prompts, or raise --max-queue");
        Err(fields.error("prompt", problem))
    }

    /// Takes the optional field `model`.
    ///
    /// # Errors
    /// 404 if it is another model's name.
    pub fn check_model(&self, fields: &mut Fields) -> Result<(), ApiError> {
        match fields.string("model")? {
            Some(model) if !model.is_empty() && model != self.model => {
                let problem = format!("model not found; this server serves {:?} (the field is optional)", self.model);
                let error = fields.error("model", problem).with_code("model_not_found");
                Err(ApiError { status: StatusCode::NOT_FOUND, ..error })
            }
            _ => Ok(()),
        }
    }
}
