//! `POST /v1/completions`.

use foretoken::chat::ReplyPart;
use foretoken::tokenizer::{StreamDecoder, Tokenizer};
use foretoken::{Piece, TokenLogprobs};
use serde_json::{Map, Value, json};

use crate::api_error::ApiError;
use crate::fields::Fields;
use crate::generate_options::{self, MAX_TOP_LOGPROBS};
use crate::ignored::take_ignored;
use crate::job::Ended;
use crate::openai::{self, Form};
use crate::prompt::{self, Prompt};
use crate::reply::{ChoiceOutput, Generate, Reply, event};
use crate::served::Served;
use crate::structured::{self, Structured};
use crate::token_json;

/// Reads the body.
pub(crate) fn request(served: &Served, mut fields: Fields) -> Result<Generate, ApiError> {
    served.check_model(&mut fields)?;
    let prompts = prompt::prompts(&mut fields, "prompt")?;
    let echoes = fields.flag("echo")?.unwrap_or(false);
    let form = openai::form(&mut fields)?;
    let most = generate_options::max_tokens(&mut fields, "max_tokens", 0)?;
    let strings = fields.strings("stop")?;
    let structured = structured::of_request(&mut fields)?.map(Structured::Format);
    let base = &served.defaults.sampling;
    let mut common = generate_options::common(&mut fields, served, base, most, strings, structured)?;
    common.options.logprobs = fields.count("logprobs", 0..=MAX_TOP_LOGPROBS)?;
    common.options.prompt_logprobs = common.options.logprobs.filter(|_| echoes);
    let choices = openai::choices(&mut fields, served.parallel)?;
    let all = prompts.len() * choices;
    served.check_places(&fields, all)?;
    take_ignored(&mut fields, &common.options.sampling)?;
    fields.end()?;
    let echoed = if echoes { prompts.iter().map(|prompt| Echo::new(served, prompt)).collect() } else { Vec::new() };
    Ok(Generate {
        prompts,
        prompt_field: "prompt",
        reply: Box::new(Completion {
            form: Form { logprobs: common.options.logprobs.is_some(), ..form },
            places: (0..all).map(|_| Default::default()).collect(),
            unsent_echoes: if echoes { vec![true; all] } else { Vec::new() },
            echoed,
        }),
        common,
        choices,
        streams: form.streams,
    })
}

/// What the text of a prompt's choices begins with.
struct Echo {
    text: String,
    /// Whether the names of control tokens are in the text. Of a prompt of ids they are not.
    has_names: bool,
}

impl Echo {
    /// There are no conversations here.
    fn new(served: &Served, prompt: &Prompt) -> Self {
        let decode = |ids: &[u32]| served.engine.tokenizer().and_then(|tokenizer| tokenizer.decode(ids));
        match prompt {
            Prompt::Text(text) => Self { text: text.clone(), has_names: true },
            Prompt::Ids(ids) => Self { text: decode(ids).unwrap_or_default(), has_names: false },
            Prompt::Chat(_) => Self { text: String::new(), has_names: false },
        }
    }
}

/// What begins the ids, and the type of responses and chunks.
const OBJECT: (&str, &str) = ("cmpl", "text_completion");

struct Completion {
    form: Form,
    /// For every choice, what decodes its tokens, and the characters of the text so far.
    places: Vec<(StreamDecoder, usize)>,
    /// The prompts, if the choices' texts begin with them; else none.
    echoed: Vec<Echo>,
    /// For every choice of a stream whose text begins with the prompt, whether that is still to be sent.
    unsent_echoes: Vec<bool>,
}

impl Completion {
    fn chunk(&self, output: &ChoiceOutput, choice: Value) -> Value {
        openai::chunk(self.form, output, openai::object(output, OBJECT, json!([choice])))
    }

    /// What a choice's text begins with.
    fn echo(&self, output: &ChoiceOutput) -> &str {
        self.echoed.get(output.prompt).map_or("", |echo| &echo.text)
    }

    /// A choice with `text`, the tokens of which are in `lists`.
    fn choice(&self, output: &ChoiceOutput, text: &str, lists: Lists, reason: Option<&str>) -> Value {
        let logprobs = self.form.logprobs.then(|| lists.json());
        json!({"index": output.index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    }

    /// The first event of a choice that begins with its prompt, unless it was sent.
    fn echo_event(&mut self, output: &ChoiceOutput) -> String {
        if !self.unsent_echoes.get_mut(output.index).is_some_and(std::mem::take) {
            return String::new();
        }
        let mut lists = Lists::default();
        self.add_prompt(&mut lists, output);
        event(&self.chunk(output, self.choice(output, self.echo(output), lists, None)))
    }

    /// Adds the prompt's tokens, if the text begins with it. The first one has no log-probability.
    fn add_prompt(&mut self, lists: &mut Lists, output: &ChoiceOutput) {
        let Some(echo) = self.echoed.get(output.prompt) else { return };
        let (place, tokenizer) = (&mut self.places[output.index], output.engine.tokenizer().ok());
        let mut rest = echo.text.chars();
        let others = output.prompt_logprobs.iter().map(|of| (of.token, Some(of)));
        for (id, of) in std::iter::once((output.first_token, None)).chain(others) {
            let before = place.1;
            lists.add(place, tokenizer, id, of);
            rest.by_ref().take(place.1 - before).for_each(drop);
            let name = tokenizer.filter(|tokenizer| echo.has_names && tokenizer.is_control(id));
            let name = name.and_then(|tokenizer| tokenizer.token(id)).unwrap_or_default();
            // A `<bos>` that the tokenizer adds is not in the text.
            if let Some(after) = rest.as_str().strip_prefix(&name) {
                place.1 += name.chars().count();
                rest = after.chars();
            }
        }
        // What follows is decoded on its own: it does not complete a character of the prompt.
        *place = (StreamDecoder::default(), echo.text.chars().count());
    }

    /// Adds tokens that were generated.
    fn add_text(&mut self, lists: &mut Lists, output: &ChoiceOutput, logprobs: &[TokenLogprobs]) {
        let (place, tokenizer) = (&mut self.places[output.index], output.engine.tokenizer().ok());
        logprobs.iter().for_each(|of| lists.add(place, tokenizer, of.token, Some(of)));
    }
}

/// Log-probabilities in the format of completions: a list for each of their parts.
#[derive(Default)]
struct Lists {
    tokens: Vec<String>,
    values: Vec<Option<f32>>,
    top: Vec<Option<Map<String, Value>>>,
    offsets: Vec<usize>,
}

impl Lists {
    /// Adds a token at `place`, which moves to its end.
    fn add(
        &mut self,
        place: &mut (StreamDecoder, usize),
        tokenizer: Option<&Tokenizer>,
        id: u32,
        of: Option<&TokenLogprobs>,
    ) {
        let token = |id| tokenizer.map_or_else(String::new, |tokenizer| token_text(tokenizer, id));
        let text = token(id);
        self.offsets.push(tokenizer.map_or(0, |tokenizer| offset(place, tokenizer, id)));
        self.values.push(of.map(|of| of.logprob));
        self.top.push(of.map(|of| {
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
        self.tokens.push(text);
    }

    fn json(self) -> Value {
        let Self { tokens, values, top, offsets } = self;
        json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets})
    }
}

/// A token's text; of one within a character its bytes, as OpenAI writes them (`bytes:\xe2`).
fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let escaped = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    String::from_utf8(tokenizer.token_bytes(id))
        .unwrap_or_else(|error| format!("bytes:{}", escaped(error.into_bytes())))
}

/// The characters of the text before a token, or before the character that the token continues.
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
        let mut lists = Lists::default();
        self.add_text(&mut lists, output, &piece.logprobs);
        let mut choice = self.choice(output, &piece.text, lists, None);
        if self.form.token_origins {
            choice["tokens"] = token_json::origins(&output.engine, piece);
        }
        echo + &event(&self.chunk(output, choice))
    }

    fn end(&mut self, output: &ChoiceOutput, ended: &Ended) -> String {
        let echo = self.echo_event(output);
        let choice = self.choice(output, "", Lists::default(), Some(openai::finish_reason(output, ended)));
        echo + &openai::last_chunk(self.chunk(output, choice), ended)
    }

    fn close(&mut self, choices: &[ChoiceOutput]) -> String {
        openai::last_events(self.form, openai::object(&choices[0], OBJECT, json!([])), choices)
    }

    fn whole(&mut self, choices: &[(ChoiceOutput, Ended)]) -> Value {
        let mut list = Vec::new();
        for (output, ended) in choices {
            let reason = openai::finish_reason(output, ended);
            let text = self.echo(output).to_owned() + &output.content();
            let mut lists = Lists::default();
            self.add_prompt(&mut lists, output);
            self.add_text(&mut lists, output, output.logprobs());
            list.push(self.choice(output, &text, lists, Some(reason)));
        }
        openai::whole(choices, openai::object(&choices[0].0, OBJECT, json!(list)))
    }
}
