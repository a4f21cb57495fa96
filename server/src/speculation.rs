//! The field `speculative`: a request's own drafters and number of rows.

use foretoken::speculative::{BlockSize, DraftSampling, DrafterOptions, Drafters};
use foretoken::{Engine, Speculation, SpeculationOptions};

use crate::api_error::{ApiError, Result};
use crate::fields::Fields;

/// `speculative: {enabled, type, draft_block_size}`: as `--no-speculation`, `--spec-type` and `--draft-block-size`.
pub(crate) fn speculation(fields: &mut Fields, engine: &Engine, default: &Speculation) -> Result<Speculation> {
    let Some(mut own) = fields.object("speculative")? else { return Ok(default.clone()) };
    let enabled = own.flag("enabled")?;
    let drafters = own.string("type")?;
    let block = own.count("draft_block_size", 1..=usize::MAX)?;
    if enabled == Some(false) {
        own.end()?;
        return Ok(Speculation::Off);
    }
    let mut options = match default {
        Speculation::With(options) => options.clone(),
        _ => SpeculationOptions::default(),
    };
    if let Some(rows) = block {
        options.block = BlockSize::Fixed(rows);
        // Without listed drafters, a block size selects the assistant, as on the command line.
        if drafters.is_none() && options.drafters == Drafters::Auto {
            if engine.has_mtp() {
                options.drafters = Drafters::Priority(vec![DrafterOptions::Mtp]);
            } else if engine.draft_model().is_none() {
                let problem = "needs an assistant, a NextN head or a draft model; omit it, or name drafters in type";
                return Err(own.error("draft_block_size", problem));
            }
        }
    }
    if let Some(name) = &drafters {
        if name.contains(':') {
            // Parameters are sizes of tables, which only the command line may set.
            return Err(
                own.error("type", "must be auto or a list of drafters without parameters, such as ngram-map-k,mtp")
            );
        }
        let named = name.parse::<Drafters>();
        options.drafters = named.map_err(|error| ApiError::of(&error, "prompt"))?;
    }
    own.end()?;
    match (enabled, drafters.is_some() || block.is_some()) {
        (Some(true), false) if matches!(default, Speculation::Off) => Ok(Speculation::Auto),
        (_, false) => Ok(default.clone()),
        _ => Ok(Speculation::With(options)),
    }
}

/// `speculation` with greedy drafts, on which the text of a seed does not depend.
pub(crate) fn reproducible(speculation: Speculation) -> Speculation {
    match speculation {
        Speculation::With(options) => {
            Speculation::With(SpeculationOptions { drafts: DraftSampling::Greedy, ..options })
        }
        other => other,
    }
}
