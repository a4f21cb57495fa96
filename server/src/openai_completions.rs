//! `POST /v1/completions`.

use foretoken::chat::ReplyPart;
use foretoken::tokenizer::{StreamDecoder, Tokenizer};
use foretoken::{Piece, TokenLogprobs};
use serde_json::{Map, Value, json};

use crate::api_error::ApiError;
use crate::app::App;
use crate::convert::{self, MAX_TOP_LOGPROBS, Prompt};
use crate::fields::Fields;
use crate::ignored::take_ignored;
use crate::job::Ended;
use crate::min_tokens::MinTokens;
use crate::openai::{self, Form};
use crate::reply::{ChoiceOutput, Generate, Reply, event};
use crate::structured::Structured;

/// Reads the body.
pub(crate) fn request(app: &App, mut fields: Fields) -> Result<Generate, ApiError> {
    app.check_model(&mut fields)?;
    let prompts = convert::prompts(&mut fields, "prompt")?;
    let echoes = fields.flag("echo")?.unwrap_or(false);
    let form = openai::form(&mut fields)?;
    let most = convert::max_tokens(&mut fields, "max_tokens", 0)?;
    let strings = convert::strings(&mut fields, "stop")?;
    let structured = Structured::of_request(&mut fields)?;
    let mut common = convert::common(&mut fields, &app.engine, &app.defaults, &app.defaults.sampling, most)?;
    common.options.stop = convert::stop(&mut fields, strings)?;
    common.min_tokens = MinTokens::of_request(&mut fields, &app.engine, &mut common.options, &structured)?;
    common.options.logprobs = fields.count("logprobs", 0..=MAX_TOP_LOGPROBS)?;
    if echoes && common.options.logprobs.is_some() {
        // Those of the prompt are not computed.
        let problem = "is supported only without logprobs; omit one of them";
        return Err(fields.error("echo", problem).with_code("unsupported_parameter"));
    }
    let choices = openai::choices(&mut fields, app.parallel)?;
    let all = prompts.len() * choices;
    app.check_places(&fields, all)?;
    take_ignored(&mut fields, &common.options.sampling)?;
    fields.end()?;
    let echoed = if echoes { prompts.iter().map(|prompt| text(app, prompt)).collect() } else { Vec::new() };
    Ok(Generate {
        prompts,
        prompt_field: "prompt",
        reply: Box::new(Completion {
            form: Form { logprobs: common.options.logprobs.is_some(), ..form },
            places: (0..all).map(|_| Default::default()).collect(),
            echoed,
        }),
        common,
        structured,
        choices,
        streams: form.streams,
    })
}

/// A prompt's text. There are no conversations here.
fn text(app: &App, prompt: &Prompt) -> String {
    match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Ids(ids) => app.engine.tokenizer().and_then(|tokenizer| tokenizer.decode(ids)).unwrap_or_default(),
        Prompt::Chat(_) => String::new(),
    }
}

/// What begins the ids, and the type of responses and chunks.
const OBJECT: (&str, &str) = ("cmpl", "text_completion");

struct Completion {
    form: Form,
    /// For every choice, what decodes its tokens, and the characters of the text so far.
    places: Vec<(StreamDecoder, usize)>,
    /// The prompts' texts, if the choices' begin with them; else none.
    echoed: Vec<String>,
}

impl Completion {
    fn chunk(&self, output: &ChoiceOutput, choice: Value) -> Value {
        openai::chunk(self.form, output, openai::object(output, OBJECT, json!([choice])))
    }

    /// What a choice's text begins with.
    fn echo(&self, output: &ChoiceOutput) -> String {
        self.echoed.get(output.prompt).cloned().unwrap_or_default()
    }

    fn choice(&mut self, output: &ChoiceOutput, text: &str, logprobs: &[TokenLogprobs], reason: Option<&str>) -> Value {
        let logprobs = self.form.logprobs.then(|| self.lists(output, logprobs));
        json!({"index": output.index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    }

    /// Log-probabilities in the format of completions: an array for each of their parts.
    fn lists(&mut self, output: &ChoiceOutput, logprobs: &[TokenLogprobs]) -> Value {
        let place = &mut self.places[output.index];
        let tokenizer = output.engine.tokenizer().ok();
        let token = |id| tokenizer.map_or_else(String::new, |tokenizer| token_text(tokenizer, id));
        let (mut tokens, mut values, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for of in logprobs {
            let text = token(of.token);
            offsets.push(tokenizer.map_or(0, |tokenizer| offset(place, tokenizer, of.token)));
            let mut best = Map::new();
            for (id, logprob) in &of.top {
                // Of tokens with the same text, the most probable one.
                best.entry(token(*id)).or_insert_with(|| json!(logprob));
            }
            if !best.is_empty() {
                best.insert(text.clone(), json!(of.logprob));
            }
            top.push(best);
            values.push(of.logprob);
            tokens.push(text);
        }
        json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets})
    }
}

/// A token's text; of one within a character its bytes, as OpenAI writes them (`bytes:\xe2`).
fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let escaped = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    String::from_utf8(tokenizer.token_bytes(id))
        .unwrap_or_else(|error| format!("bytes:{}", escaped(error.into_bytes())))
}

/// The characters of the text before a token, or before the character that the token goes on with.
fn offset((decoder, characters): &mut (StreamDecoder, usize), tokenizer: &Tokenizer, id: u32) -> usize {
    let count = |text: foretoken::Result<String>| text.map_or(0, |text| text.chars().count());
    if tokenizer.is_control(id) {
        // It ends an incomplete character.
        *characters += count(decoder.finish(tokenizer));
    }
    let before = *characters;
    *characters += count(decoder.push(tokenizer, id));
    match String::from_utf8(tokenizer.token_bytes(id)) {
        // What was incomplete before it is in the text as well.
        Ok(own) if !tokenizer.is_control(id) => characters.saturating_sub(own.chars().count()),
        _ => before,
    }
}

impl Reply for Completion {
    fn begin(&mut self, output: &ChoiceOutput) -> String {
        let prompt = self.echo(output);
        if prompt.is_empty() {
            return String::new();
        }
        let choice = self.choice(output, &prompt, &[], None);
        event(&self.chunk(output, choice))
    }

    fn piece(&mut self, piece: &Piece, _: &[ReplyPart], output: &ChoiceOutput) -> String {
        if piece.text.is_empty() && piece.logprobs.is_empty() && !self.form.token_origins {
            return String::new();
        }
        let mut choice = self.choice(output, &piece.text, &piece.logprobs, None);
        if self.form.token_origins {
            choice["tokens"] = convert::origins(&output.engine, piece);
        }
        event(&self.chunk(output, choice))
    }

    fn end(&mut self, output: &ChoiceOutput, ended: &Ended) -> String {
        let choice = self.choice(output, "", &[], Some(openai::finish_reason(output, ended)));
        openai::last_chunk(self.chunk(output, choice), ended)
    }

    fn close(&mut self, choices: &[ChoiceOutput]) -> String {
        openai::last_events(self.form, openai::object(&choices[0], OBJECT, json!([])), choices)
    }

    fn whole(&mut self, choices: &[(ChoiceOutput, Ended)]) -> Value {
        let mut list = Vec::new();
        for (output, ended) in choices {
            let reason = openai::finish_reason(output, ended);
            let text = self.echo(output) + &output.text;
            list.push(self.choice(output, &text, output.logprobs(), Some(reason)));
        }
        openai::whole(choices, openai::object(&choices[0].0, OBJECT, json!(list)))
    }
}
