//! Errors on one line, with a command's options for the library's arguments.

use std::error::Error as StdError;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use foretoken::Error;

/// The library's arguments, and the options that set them.
const OPTIONS: [(&str, &[&str]); 31] = [
    ("assistant", &["assistant"]),
    ("block", &["draft-block-size", "blocks"]),
    ("centroids", &["centroids"]),
    ("constraint", &["json-schema", "regex", "grammar"]),
    ("costs", &["costs"]),
    ("device", &["device"]),
    ("drafters", &["spec-type", "mixture"]),
    ("dry.allowed_length", &["dry-allowed-length"]),
    ("dry.base", &["dry-base"]),
    ("dry.multiplier", &["dry-multiplier"]),
    ("max_context", &["context"]),
    ("max_windows", &["windows"]),
    ("min_p", &["min-p"]),
    ("penalties.frequency", &["frequency-penalty"]),
    ("penalties.presence", &["presence-penalty"]),
    ("penalties.repeat", &["repeat-penalty"]),
    ("quantize", &["quantize"]),
    ("requantize", &["allow-requantize"]),
    ("simulate_acceptance", &["simulate-acceptance"]),
    ("skip_streak", &["skip-streak"]),
    ("stop.strings", &["stop"]),
    ("temperature", &["temperature"]),
    ("threads", &["threads"]),
    ("tools", &["tools"]),
    ("top_k", &["top-k"]),
    ("top_n_sigma", &["top-n-sigma"]),
    ("top_p", &["top-p"]),
    ("typical_p", &["typical"]),
    ("window", &["window"]),
    ("xtc.probability", &["xtc-probability"]),
    ("xtc.threshold", &["xtc-threshold"]),
];

/// The long names of a command's options, those that were given before the others.
#[derive(Default)]
pub(crate) struct Options(Vec<String>);

impl Options {
    pub fn new(command: &Command, matches: &ArgMatches) -> Self {
        let is_default = |id: &str| matches.value_source(id) != Some(ValueSource::CommandLine);
        let option = |arg: &clap::Arg| Some((is_default(arg.get_id().as_str()), arg.get_long()?.to_owned()));
        let mut options: Vec<_> = command.get_arguments().filter_map(option).collect();
        options.sort_by_key(|(is_default, _)| *is_default);
        Self(options.into_iter().map(|(_, name)| name).collect())
    }

    /// The option that sets an argument of the library.
    fn of_argument(&self, argument: &str) -> Option<&String> {
        let (_, options) = OPTIONS.iter().find(|(name, _)| *name == argument)?;
        self.0.iter().find(|option| options.contains(&option.as_str()))
    }

    /// How a sequence can be made to fit the context, which some commands cannot change.
    fn shortening(&self) -> String {
        let depth = self.0.iter().find(|option| ["depth", "depths"].contains(&option.as_str()));
        match (self.of_argument("max_context"), depth) {
            (Some(option), _) => format!("shorten the prompt or raise --{option}"),
            (None, Some(option)) => format!("lower --{option}"),
            (None, None) => "shorten the prompt".into(),
        }
    }

    /// An error and its causes on one line.
    pub fn line(&self, error: &anyhow::Error) -> String {
        one_line(&error.chain().map(|cause| self.cause(cause)).collect::<Vec<_>>().join(": "))
    }

    fn cause(&self, cause: &(dyn StdError + 'static)) -> String {
        let named = match cause.downcast_ref::<Error>() {
            Some(Error::Argument { name, problem }) => {
                self.of_argument(name).map(|option| format!("--{option}: {problem}"))
            }
            Some(Error::Unsupported { path: None, what, problem }) => {
                self.of_argument(what).map(|option| format!("--{option}: {problem}"))
            }
            Some(Error::Context { needed, limit }) => {
                Some(format!("{needed} tokens do not fit the context of {limit}; {}", self.shortening()))
            }
            _ => None,
        };
        named.unwrap_or_else(|| cause.to_string())
    }
}

pub(crate) fn one_line(message: &str) -> String {
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use clap::Arg;

    use super::*;

    #[test]
    fn the_option_that_was_given_is_named() {
        let options = ["json-schema", "regex", "grammar", "context"].map(|name| Arg::new(name).long(name));
        let command = Command::new("x").args(options).arg(Arg::new("prompt"));
        let line = |arguments: &[&str], error: anyhow::Error| {
            let matches = command.clone().try_get_matches_from([&["x"], arguments].concat()).expect("arguments");
            Options::new(&command, &matches).line(&error)
        };
        let argument = |name| Error::Argument { name, problem: "is\nwrong".into() };
        assert_eq!(line(&["--regex", "("], argument("constraint").into()), "--regex: is wrong");
        assert_eq!(line(&["a prompt"], argument("constraint").into()), "--json-schema: is wrong");
        let unsupported = |what: &str, path| Error::Unsupported { path, what: what.into(), problem: "is new".into() };
        assert_eq!(line(&["--regex", "a"], unsupported("constraint", None).into()), "--regex: is new");
        assert_eq!(line(&["--regex", "a"], unsupported("tool calls", None).into()), "tool calls: is new");
        assert_eq!(line(&[], unsupported("grammar", Some("file".into())).into()), "file: grammar: is new");
        for unknown in ["skip_streak", "prompt"] {
            assert_eq!(line(&[], argument(unknown).into()), format!("{unknown}: is wrong"), "it is no option here");
        }
        let context: foretoken::Result<()> = Err(Error::Context { needed: 9, limit: 8 });
        let context = context.context("prompt 2").expect_err("an error");
        let want = "prompt 2: 9 tokens do not fit the context of 8; shorten the prompt or raise --context";
        assert_eq!(line(&[], context), want);
        // Commands without that option.
        for (option, remedy) in [("depth", "lower --depth"), ("prompts", "shorten the prompt")] {
            let options = Options(vec![option.to_owned()]);
            let want = format!("9 tokens do not fit the context of 8; {remedy}");
            assert_eq!(options.line(&Error::Context { needed: 9, limit: 8 }.into()), want);
        }
    }
}
