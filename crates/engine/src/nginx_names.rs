//! Names of nginx's directives and variables: for the error "nginx has this directive, Gale does not yet", the same for
//! variables, and for `gale directives --missing`.
//!
//! The tables only list what exists in nginx 1.31.5; Gale's own directives and variables are described in their
//! modules.

use std::sync::OnceLock;

/// A directive of nginx.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NginxDirective {
    /// Its module, without `ngx_` and `_module`.
    pub module: &'static str,
    /// Name.
    pub name: &'static str,
    /// Contexts that it is allowed in.
    pub contexts: &'static str,
}

const TABLE: &str = include_str!("../data/nginx-directives.tsv");

/// Variables of `http`. A name ending in `_` is a prefix.
const VARIABLES: &str = include_str!("../data/nginx-variables.tsv");

/// All directives, repeated for each module that has them.
pub fn rows() -> impl Iterator<Item = NginxDirective> {
    TABLE.lines().skip(1).filter_map(|line| {
        let mut columns = line.split('\t');
        Some(NginxDirective { module: columns.next()?, name: columns.next()?, contexts: columns.next()? })
    })
}

/// Names of all directives, unique and sorted.
pub fn directives() -> &'static [&'static str] {
    static NAMES: OnceLock<Vec<&'static str>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let mut names: Vec<_> = rows().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        names
    })
}

/// `true` if nginx's `http` has a variable of this name.
pub fn has_variable(name: &[u8]) -> bool {
    let mut names = VARIABLES.lines().skip(1).filter_map(|line| Some(line.split_once('\t')?.1.as_bytes()));
    names.any(|known| known == name || known.ends_with(b"_") && name.starts_with(known))
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

    #[test]
    fn variables_are_known_by_name_or_by_their_beginning() {
        for name in ["upstream_addr", "upstream_http_x_own", "ssl_protocol"] {
            assert!(has_variable(name.as_bytes()), "{name}");
        }
        for name in ["upstream", "upstream_addr_", "ssl_", "nonsense", ""] {
            assert!(!has_variable(name.as_bytes()), "{name}");
        }
    }
}
