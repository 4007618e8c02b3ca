//! Router of sentence-transformers: several pipelines of modules, of which one is chosen for queries and another for documents.

use super::{
    json::{Json, check_known},
    modules::{Entry, entry},
};
use crate::{runtime::weights::ModelFiles, text::TextError};

/// Class of the module.
pub(super) const ROUTER: &str = "Router";
/// Names of the module's file. Older versions use the second name.
const FILES: [&str; 2] = ["router_config.json", "config.json"];

/// The loaded pipeline, and the names of the others.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) name: String,
    pub(super) others: Vec<String>,
}

/// Replaces a Router with the modules of its default route.
///
/// # Errors
/// Returns an error if the router's file is missing or malformed, or if routes depend on more than a task.
pub(super) fn routed(
    root: &ModelFiles,
    listed: Vec<Entry>,
) -> Result<(Vec<Entry>, Option<Route>), TextError> {
    let is_router = |entry: &Entry| entry.class == ROUTER;
    match listed.iter().position(is_router) {
        None => return Ok((listed, None)),
        Some(0) if listed[0].folder.is_empty() => {}
        Some(_) => {
            let file = root.name("modules.json");
            let problem = "a `Router` is read as the first module with an empty `path`".to_owned();
            return Err(TextError::Folder { file, problem });
        }
    }
    let json = match Json::optional(root, FILES[0])? {
        Some(json) => json,
        None => Json::read(root, FILES[1])?,
    };
    json.check_keys(&["types", "structure", "parameters"])?;
    let structure = json.object("structure")?;
    let parameters = Json {
        file: json.file.clone(),
        value: json.object("parameters")?.into(),
    };
    let known = ["default_route", "allow_empty_key", "route_mappings"];
    check_known(&json.object("parameters")?, &known)
        .map_err(|problem| json.problem(format!("`parameters`: {problem}")))?;
    if !parameters.object("route_mappings")?.is_empty() {
        return Err(parameters.wrong("route_mappings", "none, as gemmule has one route"));
    }
    let name = match parameters.text("default_route")? {
        Some(name) => Some(name.to_owned()),
        // If the file names no default route, its first route is the default. The parsed routes are not in the order of the file, so this
        // is supported only for a single route.
        None if parameters.flag("allow_empty_key", true)? && structure.len() == 1 => {
            structure.keys().next().cloned()
        }
        None => None,
    };
    let name = name.filter(|name| structure.contains_key(name));
    let name = name.ok_or_else(|| parameters.wrong("default_route", "the name of a route"))?;
    let types = json.object("types")?;
    let folders = structure[&name].as_array();
    let wrong = || {
        json.problem(format!(
            "the route `{name}` is not a list of modules in `types`"
        ))
    };
    let mut entries = Vec::new();
    for folder in folders.ok_or_else(wrong)? {
        let folder = folder.as_str().ok_or_else(wrong)?;
        let class = types.get(folder).and_then(|class| class.as_str());
        entries.push(entry(&json, folder, class.ok_or_else(wrong)?, false)?);
    }
    entries.extend(listed.into_iter().skip(1));
    let others = structure.keys().filter(|other| **other != name);
    let others = others.cloned().collect();
    Ok((entries, Some(Route { name, others })))
}
