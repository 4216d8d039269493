//! Verdicts on directives, derived from the directive tables and the documented differences.

use std::collections::HashMap;

use bstr::ByteSlice;
use gale_config::{Diagnostic, Sources, Tables};

use crate::differences::{Difference, Differences};
use crate::documented;
use crate::report::{Directive, PLACES_MAX, Problem, SourceLine, Verdict};
use crate::tree::{Node, Tree};

/// Returns the directives used with their verdicts, and the other errors of the configuration.
pub fn survey<Cx>(tree: &Tree<'_>, sources: &Sources, tables: &Tables<Cx>) -> (Vec<Directive>, Vec<Problem>) {
    let differences = Differences::read();
    let mut found: HashMap<(Verdict, &[u8], &str), Directive> = HashMap::new();
    let mut problems = Vec::new();
    for node in &tree.nodes {
        let (verdict, difference) = match judge(node, tables, &differences) {
            Ok(judged) => judged,
            Err(error) => {
                if problems.len() < PLACES_MAX {
                    problems.push(problem(&error, sources));
                }
                continue;
            }
        };
        let text = difference.map_or("", |difference| difference.text);
        let directive = found.entry((verdict, node.name(), text)).or_insert_with(|| Directive {
            name: node.name().to_str_lossy().into_owned(),
            verdict,
            count: 0,
            text: match verdict {
                Verdict::Unknown => meant(node, tables),
                Verdict::Missing => whose(node.name()),
                _ => text.to_owned(),
            },
            more: difference.and_then(|difference| difference.more.clone()),
            places: Vec::new(),
        });
        directive.count += 1;
        let is_missing = matches!(verdict, Verdict::Missing | Verdict::Unknown);
        let places_max = if is_missing { PLACES_MAX } else { 1 };
        if directive.places.len() < places_max {
            directive.places.extend(SourceLine::of(node.statement.name.span, sources));
        }
    }
    let mut directives: Vec<Directive> = found.into_values().collect();
    directives
        .sort_by(|one, other| (one.verdict, &one.name, &one.text).cmp(&(other.verdict, &other.name, &other.text)));
    (directives, problems)
}

fn judge<'d, Cx>(
    node: &Node<'_>,
    tables: &Tables<Cx>,
    differences: &'d Differences,
) -> Result<(Verdict, Option<&'d Difference>), Diagnostic> {
    let name = node.name().to_str().unwrap_or("");
    if node.statement.broken.is_none() && !tables.contains(name) {
        let is_known = tables.is_of_nginx(name) || documented::owner(name).is_some();
        return Ok((if is_known { Verdict::Missing } else { Verdict::Unknown }, None));
    }
    let row = tables.find(node.statement, node.context)?.directive;
    let difference = differences.of(name, node.statement, node.context);
    let verdict = match difference {
        _ if !row.store.has_effect() => Verdict::NoEffect,
        _ if !tables.is_of_nginx(name) && documented::owner(name).is_none() => Verdict::Own,
        Some(_) => Verdict::Different,
        None => Verdict::Same,
    };
    Ok((verdict, difference))
}

/// Returns the suggestion for an unknown directive: the hint of the error that the tables return.
fn meant<Cx>(node: &Node<'_>, tables: &Tables<Cx>) -> String {
    tables.find(node.statement, node.context).err().and_then(|error| error.hint).unwrap_or_default()
}

/// Returns the owner of a missing directive, or an empty text if it is part of nginx's source.
fn whose(name: &[u8]) -> String {
    let owner = name.to_str().ok().and_then(documented::owner);
    owner.map(|owner| owner.to_string()).unwrap_or_default()
}

fn problem(error: &Diagnostic, sources: &Sources) -> Problem {
    Problem {
        message: error.message.clone(),
        hint: error.hint.clone(),
        place: error.span.and_then(|span| SourceLine::of(span, sources)),
    }
}
