//! What nginx has, as data: the yardstick for "nginx has this directive, Gale
//! does not yet" and for `gale directives --missing`.
//!
//! The table only says what exists in nginx 1.31.5; what Gale's own directives
//! mean stands in their modules.

use std::sync::OnceLock;

/// A directive of nginx.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NginxDirective {
    /// The module that has it, without `ngx_` and `_module`.
    pub module: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Where it may stand.
    pub contexts: &'static str,
}

const TABLE: &str = include_str!("../data/nginx-directives.tsv");

/// Every directive, as often as nginx has it.
pub fn rows() -> impl Iterator<Item = NginxDirective> {
    TABLE.lines().skip(1).filter_map(|line| {
        let mut columns = line.split('\t');
        Some(NginxDirective { module: columns.next()?, name: columns.next()?, contexts: columns.next()? })
    })
}

/// The names of all directives, each once, sorted.
pub fn directives() -> &'static [&'static str] {
    static NAMES: OnceLock<Vec<&'static str>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let mut names: Vec<_> = rows().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        names
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_read() {
        assert!(directives().len() > 600);
        assert!(directives().contains(&"proxy_pass"));
        assert!(rows().any(|row| row.module == "http_limit_req" && row.name == "limit_req"));
    }
}
