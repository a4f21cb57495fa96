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
    common.options.prompt_logprobs = common.options.logprobs.filter(|_| echoes);
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
            unbegun: if echoes { vec![true; all] } else { Vec::new() },
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
    /// For every choice of a stream whose text begins with the prompt, whether that is still to be sent.
    unbegun: Vec<bool>,
}

impl Completion {
    fn chunk(&self, output: &ChoiceOutput, choice: Value) -> Value {
        openai::chunk(self.form, output, openai::object(output, OBJECT, json!([choice])))
    }

    /// What a choice's text begins with.
    fn echo(&self, output: &ChoiceOutput) -> String {
        self.echoed.get(output.prompt).cloned().unwrap_or_default()
    }

    /// A choice with `text`, the tokens of which have `logprobs`, but the one before them, if there is one.
    fn choice(
        &mut self,
        output: &ChoiceOutput,
        text: &str,
        (first, logprobs): (Option<u32>, &[TokenLogprobs]),
        reason: Option<&str>,
    ) -> Value {
        let logprobs = self.form.logprobs.then(|| self.lists(output, first, logprobs));
        json!({"index": output.index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    }

    /// The first event of a choice that begins with its prompt, unless it was sent.
    fn echo_event(&mut self, output: &ChoiceOutput) -> String {
        if !self.unbegun.get_mut(output.index).is_some_and(std::mem::take) {
            return String::new();
        }
        let (text, logprobs) = (self.echo(output), (Some(output.first_token), &*output.prompt_logprobs));
        let choice = self.choice(output, &text, logprobs, None);
        event(&self.chunk(output, choice))
    }

    /// Log-probabilities in the format of completions: an array for each of their parts. `first`, a token before the
    /// others, has none.
    fn lists(&mut self, output: &ChoiceOutput, first: Option<u32>, logprobs: &[TokenLogprobs]) -> Value {
        let place = &mut self.places[output.index];
        let tokenizer = output.engine.tokenizer().ok();
        let token = |id| tokenizer.map_or_else(String::new, |tokenizer| token_text(tokenizer, id));
        let (mut tokens, mut values, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let first = first.map(|id| (id, None)).into_iter();
        for (id, of) in first.chain(logprobs.iter().map(|of| (of.token, Some(of)))) {
            let text = token(id);
            offsets.push(tokenizer.map_or(0, |tokenizer| offset(place, tokenizer, id)));
            values.push(of.map(|of| of.logprob));
            top.push(of.map(|of| {
                let mut best = Map::new();
                for (id, logprob) in &of.top {
                    // Of tokens with the same text, the most probable one.
                    best.entry(token(*id)).or_insert_with(|| json!(logprob));
                }
                if !best.is_empty() {
                    best.insert(text.clone(), json!(of.logprob));
                }
                best
            }));
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
        // With log-probabilities, once they are known.
        if self.form.logprobs { String::new() } else { self.echo_event(output) }
    }

    fn piece(&mut self, piece: &Piece, _: &[ReplyPart], output: &ChoiceOutput) -> String {
        let echo = self.echo_event(output);
        if piece.text.is_empty() && piece.logprobs.is_empty() && !self.form.token_origins {
            return echo;
        }
        let mut choice = self.choice(output, &piece.text, (None, &*piece.logprobs), None);
        if self.form.token_origins {
            choice["tokens"] = convert::origins(&output.engine, piece);
        }
        echo + &event(&self.chunk(output, choice))
    }

    fn end(&mut self, output: &ChoiceOutput, ended: &Ended) -> String {
        let echo = self.echo_event(output);
        let choice = self.choice(output, "", (None, &[]), Some(openai::finish_reason(output, ended)));
        echo + &openai::last_chunk(self.chunk(output, choice), ended)
    }

    fn close(&mut self, choices: &[ChoiceOutput]) -> String {
        openai::last_events(self.form, openai::object(&choices[0], OBJECT, json!([])), choices)
    }

    fn whole(&mut self, choices: &[(ChoiceOutput, Ended)]) -> Value {
        let mut list = Vec::new();
        for (output, ended) in choices {
            let reason = openai::finish_reason(output, ended);
            let text = self.echo(output) + &output.text;
            let first = (!self.echoed.is_empty()).then_some(output.first_token);
            let logprobs = [&*output.prompt_logprobs, output.logprobs()].concat();
            list.push(self.choice(output, &text, (first, &*logprobs), Some(reason)));
        }
        openai::whole(choices, openai::object(&choices[0].0, OBJECT, json!(list)))
    }
}
